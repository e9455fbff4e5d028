// What seeds need beside the layers of networks: an end for gradients, a cut for numbers that are not finite, and a
// seed that learns from the gradient of features which it does not change. See esper/training/delta.py.
#pragma once

#include <algorithm>
#include <cmath>

#include "elementwise.h"

namespace esper::tape {
namespace {

// out = in times 1, or 0.
template <typename Real>
void copy_positions(const Machine<Real>& machine, const Value<Real>& in, const Value<Real>& out, bool zero) {
    for_positions(machine, in, [&](int64_t at, int64_t, int64_t) {
        store(zero ? splat(Real{}) : load(in.data + at), out.data + at);
    });
}

template <typename Real>
void detach_forward(Machine<Real>& machine, const Instruction& instruction) {
    copy_positions(machine, machine.value(instruction.input), machine.value(instruction.output), false);
}

// Whether all numbers of the samples are finite: x - x is 0 for a finite number, and NaN for others.
template <typename Real>
bool all_finite(const Machine<Real>& machine, const Value<Real>& value, const Real* numbers) {
    double sum = 0;
    for (int64_t g = 0; g < machine.groups; ++g) {
        Lanes<Real> sums = splat(Real{});
        for (int64_t c = 0; c < value.channels; ++c) {
            const Real* plane = numbers + value.at(g, c);
            for (int64_t i = 0; i < value.elements(); i += kLanes) {
                const Lanes<Real> lanes = load(plane + i);
                sums = sums + (lanes - lanes);
            }
        }
        sum += total(only(sums, machine.count(g)));
    }
    return sum == 0;
}

// number 0: the flag of a seed, which is false once it was not finite. 1: whether gradients are looked at on their way
// back, rather than the numbers themselves. 2: whether what is not finite clears the flag.
//
// Numbers forward are cut by the flag as it is then, and so are their gradients; gradients that are looked at, by the
// flag as it is when they come back.
template <typename Real>
bool& flag_of(const Machine<Real>& machine, const Instruction& instruction) {
    return *static_cast<bool*>(machine.tensors[static_cast<size_t>(instruction.number[0])].data);
}

template <typename Real>
void guard_forward(Machine<Real>& machine, const Instruction& instruction) {
    const Value<Real>& in = machine.value(instruction.input);
    const Value<Real>& out = machine.value(instruction.output);
    if (instruction.number[1] != 0) return copy_positions(machine, in, out, false);
    bool& flag = flag_of(machine, instruction);
    if (instruction.number[2] != 0 && !all_finite(machine, in, in.data)) flag = false;
    *machine.kept(instruction, 1) = static_cast<Real>(flag);
    copy_positions(machine, in, out, !flag);
}

template <typename Real>
void guard_backward(Machine<Real>& machine, const Instruction& instruction) {
    Value<Real>& in = machine.value(instruction.input);
    const Value<Real>& out = machine.value(instruction.output);
    if (!in.needed) return;
    bool& flag = flag_of(machine, instruction);
    bool passes = flag;
    if (instruction.number[1] == 0) {
        passes = *machine.kept(instruction, 1) != 0;
    } else if (instruction.number[2] != 0 && !all_finite(machine, out, out.gradient)) {
        flag = false;
        passes = false;
    }
    for_positions(machine, in, [&](int64_t at, int64_t, int64_t) {
        give(passes ? load(out.gradient + at) : splat(Real{}), in.gathered, in.gradient + at);
    });
    in.gathered = true;
}

// The sum of a times b over all samples of a value, in float64. The numbers are those of data or of gradients.
template <typename Real>
double dot(const Machine<Real>& machine, const Value<Real>& value, const Real* a, const Real* b) {
    double sum = 0;
    for (int64_t g = 0; g < machine.groups; ++g) {
        for (int64_t c = 0; c < value.channels; ++c) {
            const int64_t at = value.at(g, c);
            sum += total(only(plane_product(a + at, b + at, value.elements()), machine.count(g)));
        }
    }
    return sum;
}

// out = in; the other value, a delta d of the features h that come in, has the gradient of min(1, |h| / |d|) d, and
// above that limit one that restores it. esper.core.blend.limited derives the formula.
template <typename Real>
void pass_through_forward(Machine<Real>& machine, const Instruction& instruction) {
    const Value<Real>& in = machine.value(instruction.input);
    *machine.kept(instruction, 1) = static_cast<Real>(std::sqrt(dot(machine, in, in.data, in.data)));
    copy_positions(machine, in, machine.value(instruction.output), false);
}

template <typename Real>
void pass_through_backward(Machine<Real>& machine, const Instruction& instruction) {
    constexpr double kTiny = 1e-30;
    Value<Real>& in = machine.value(instruction.input);
    Value<Real>& delta = machine.value(instruction.other);
    const Value<Real>& out = machine.value(instruction.output);
    if (in.needed) {
        for_positions(machine, in, [&](int64_t at, int64_t, int64_t) {
            give(load(out.gradient + at), in.gathered, in.gradient + at);
        });
        in.gathered = true;
    }
    if (!delta.needed) return;
    const auto size_h = static_cast<double>(*machine.kept(instruction, 1));
    const double size_d = std::max(std::sqrt(dot(machine, delta, delta.data, delta.data)), kTiny);
    double scale = 1, slope = 0;  // of the gradient that arrives, and of the delta
    if (!(size_d <= size_h)) {
        const double ratio = size_d / std::max(size_h, kTiny);
        const double along = dot(machine, out, out.gradient, delta.data) / size_d;
        const double square = dot(machine, out, out.gradient, out.gradient);
        const double across = std::sqrt(std::max(square - along * along, 0.0));
        scale = std::min(size_h / size_d, 1.0);
        slope = std::max(ratio - 1, 0.0) * scale * across / size_d;
        if (ratio > 1) slope -= scale * along / size_d;
    }
    const Lanes<Real> factor = splat(static_cast<Real>(scale));
    const Lanes<Real> turn = splat(static_cast<Real>(slope));
    for_positions(machine, delta, [&](int64_t at, int64_t g, int64_t) {
        Lanes<Real> gradient = load(out.gradient + at);
        if (scale != 1 || slope != 0) {
            // A lane without a sample has no gradient, but a delta.
            gradient = only(fma(load(delta.data + at), turn, gradient * factor), machine.count(g));
        }
        give(gradient, delta.gathered, delta.gradient + at);
    });
    delta.gathered = true;
}

}  // namespace
}  // namespace esper::tape
