// Layers that compute each position by itself: activations, a scale of channels, products and sums of two values.
#pragma once

#include <cmath>

#include "gelu.h"
#include "machine.h"

namespace esper::tape {
namespace {

// Activations, in the order of esper/ops/tape.py. number 0 is the kind, constant 0 the slope or alpha.
enum Activation : int64_t { kRelu = 0, kLeakyRelu, kElu, kGelu, kGeluTanh, kSilu, kTanh, kSigmoid };

template <typename Real>
ESPER_INLINE Real sigmoid(Real x) {
    const Real e = std::exp(-std::abs(x));
    return (x >= 0 ? Real{1} : e) / (1 + e);
}

// f(x).
template <typename Real>
Real activated(Activation kind, Real x, Real alpha) {
    constexpr Real kRootHalf = static_cast<Real>(0.70710678118654752440);
    constexpr Real kGeluFactor = static_cast<Real>(0.79788456080286535588);  // sqrt(2 / pi)
    switch (kind) {
        case kRelu:
            return x <= 0 ? Real{} : x;
        case kLeakyRelu:
            return x > 0 ? x : x * alpha;
        case kElu:
            return x > 0 ? x : alpha * std::expm1(x);
        case kGelu:
            return x * Real{0.5} * (1 + std::erf(x * kRootHalf));
        case kGeluTanh:
            return x * Real{0.5} * (1 + std::tanh(kGeluFactor * (x + static_cast<Real>(0.044715) * x * x * x)));
        case kSilu:
            return x * sigmoid(x);
        case kTanh:
            return std::tanh(x);
        case kSigmoid:
            return std::isnan(x) ? x : sigmoid(x);
    }
    return x;
}

// f'(x), where y = f(x).
template <typename Real>
Real activation_slope(Activation kind, Real x, Real y, Real alpha) {
    constexpr Real kRootHalf = static_cast<Real>(0.70710678118654752440);
    constexpr Real kGeluFactor = static_cast<Real>(0.79788456080286535588);
    constexpr Real kDensity = static_cast<Real>(0.39894228040143267794);  // 1 / sqrt(2 pi)
    constexpr auto kCubic = static_cast<Real>(0.044715);
    switch (kind) {
        case kRelu:
            return x <= 0 ? Real{} : Real{1};
        case kLeakyRelu:
            return x > 0 ? Real{1} : alpha;
        case kElu:
            return x > 0 ? Real{1} : y + alpha;
        case kGelu:
            return Real{0.5} * (1 + std::erf(x * kRootHalf)) + x * kDensity * std::exp(-x * x / 2);
        case kGeluTanh: {
            const Real t = std::tanh(kGeluFactor * (x + kCubic * x * x * x));
            return Real{0.5} * (1 + t) + Real{0.5} * x * (1 - t * t) * kGeluFactor * (1 + 3 * kCubic * x * x);
        }
        case kSilu: {
            const Real s = sigmoid(x);
            return s * (1 + x * (1 - s));
        }
        case kTanh:
            return 1 - y * y;
        case kSigmoid:
            return y * (1 - y);
    }
    return 1;
}

template <typename Real>
void activation_forward(Machine<Real>& machine, const Instruction& instruction) {
    const Value<Real>& in = machine.value(instruction.input);
    const Value<Real>& out = machine.value(instruction.output);
    const auto kind = static_cast<Activation>(instruction.number[0]);
    const auto alpha = static_cast<Real>(instruction.constant[0]);
    for_positions(machine, in, [&](int64_t at, int64_t, int64_t) {
        const Lanes<Real> x = load(in.data + at);
        if constexpr (sizeof(Real) == sizeof(float)) {
            if (kind == kGelu) return store(gelu(x), out.data + at);
        }
        store(kind == kRelu ? relu(x) : by_lane(x, [&](Real lane) { return activated(kind, lane, alpha); }),
              out.data + at);
    });
}

template <typename Real>
void activation_backward(Machine<Real>& machine, const Instruction& instruction) {
    Value<Real>& in = machine.value(instruction.input);
    const Value<Real>& out = machine.value(instruction.output);
    if (!in.needed) return;
    const auto kind = static_cast<Activation>(instruction.number[0]);
    const auto alpha = static_cast<Real>(instruction.constant[0]);
    for_positions(machine, in, [&](int64_t at, int64_t, int64_t) {
        const Lanes<Real> gradient = load(out.gradient + at);
        if (kind == kRelu) return give(relu_gradient(load(in.data + at), gradient), in.gathered, in.gradient + at);
        if constexpr (sizeof(Real) == sizeof(float)) {
            if (kind == kGelu) return give(gradient * gelu_slope(load(in.data + at)), in.gathered, in.gradient + at);
        }
        Real slopes[kLanes];
        for (int l = 0; l < kLanes; ++l) {
            slopes[l] = activation_slope(kind, in.data[at + l], out.data[at + l], alpha);
        }
        give(gradient * load(slopes), in.gathered, in.gradient + at);
    });
    in.gathered = true;
}

// The sum of a times b over the positions of a plane, by lane.
template <typename Real>
ESPER_INLINE Lanes<Real> plane_product(const Real* a, const Real* b, int64_t elements) {
    Lanes<Real> products = splat(Real{});
    for (int64_t i = 0; i < elements; i += kLanes) products = fma(load(a + i), load(b + i), products);
    return products;
}

// out = in times a parameter of each channel. number 0: the parameter.
template <typename Real>
void scale_forward(Machine<Real>& machine, const Instruction& instruction) {
    const Value<Real>& in = machine.value(instruction.input);
    const Value<Real>& out = machine.value(instruction.output);
    const Real* weight = machine.data(instruction.number[0]);
    for_positions(machine, in,
                  [&](int64_t at, int64_t, int64_t c) { store(load(in.data + at) * weight[c], out.data + at); });
}

template <typename Real>
void scale_backward(Machine<Real>& machine, const Instruction& instruction) {
    Value<Real>& in = machine.value(instruction.input);
    const Value<Real>& out = machine.value(instruction.output);
    const Real* weight = machine.data(instruction.number[0]);
    Real* result = machine.gradient(instruction.number[0]);
    if (result != nullptr) {
        for (int64_t c = 0; c < in.channels; ++c) {
            double sum = 0;
            for (int64_t g = 0; g < machine.groups; ++g) {
                const int64_t at = in.at(g, c);
                const Lanes<Real> products = plane_product(in.data + at, out.gradient + at, in.elements());
                sum += total(only(products, machine.count(g)));
            }
            result[c] = static_cast<Real>(sum);
        }
    }
    if (!in.needed) return;
    for_positions(machine, in, [&](int64_t at, int64_t, int64_t c) {
        give(load(out.gradient + at) * weight[c], in.gathered, in.gradient + at);
    });
    in.gathered = true;
}

// Where a value that may have one channel or one position is read for element i of channel c of another.
template <typename Real>
ESPER_INLINE int64_t broadcast(const Value<Real>& value, int64_t g, int64_t c, int64_t i) {
    return value.at(g, value.channels > 1 ? c : 0) + (value.positions() > 1 ? i : 0);
}

// out = in times other, which may have one number for a channel, or for a sample.
template <typename Real>
void multiply_forward(Machine<Real>& machine, const Instruction& instruction) {
    const Value<Real>& in = machine.value(instruction.input);
    const Value<Real>& other = machine.value(instruction.other);
    const Value<Real>& out = machine.value(instruction.output);
    for_positions(machine, in, [&](int64_t at, int64_t g, int64_t c) {
        const Lanes<Real> factor = load(other.data + broadcast(other, g, c, at - in.at(g, c)));
        store(load(in.data + at) * factor, out.data + at);
    });
}

template <typename Real>
void multiply_backward(Machine<Real>& machine, const Instruction& instruction) {
    Value<Real>& in = machine.value(instruction.input);
    Value<Real>& other = machine.value(instruction.other);
    const Value<Real>& out = machine.value(instruction.output);
    const bool spread = other.channels < in.channels || other.positions() < in.positions();
    if (other.needed && spread) start_gradient(machine, other);
    for_positions(machine, in, [&](int64_t at, int64_t g, int64_t c) {
        const int64_t count = machine.count(g);
        const int64_t with = broadcast(other, g, c, at - in.at(g, c));
        const Lanes<Real> d = load(out.gradient + at);
        const Lanes<Real> a = load(in.data + at), b = load(other.data + with);
        if (in.needed) give(only(d * b, count), in.gathered, in.gradient + at);
        if (other.needed) give(only(d * a, count), spread || other.gathered, other.gradient + with);
    });
    if (in.needed) in.gathered = true;
    if (other.needed) other.gathered = true;
}

// out = in + factor · other. number 0: a tensor, and 1: the element of it that is the factor; or -1, and constant 0.
template <typename Real>
Real factor_of(const Machine<Real>& machine, const Instruction& instruction) {
    if (instruction.number[0] < 0) return static_cast<Real>(instruction.constant[0]);
    return machine.data(instruction.number[0])[instruction.number[1]];
}

template <typename Real>
void add_forward(Machine<Real>& machine, const Instruction& instruction) {
    const Value<Real>& in = machine.value(instruction.input);
    const Value<Real>& other = machine.value(instruction.other);
    const Value<Real>& out = machine.value(instruction.output);
    const Lanes<Real> factor = splat(factor_of(machine, instruction));
    for_positions(machine, in, [&](int64_t at, int64_t, int64_t) {
        store(fma(load(other.data + at), factor, load(in.data + at)), out.data + at);
    });
}

template <typename Real>
void add_backward(Machine<Real>& machine, const Instruction& instruction) {
    Value<Real>& in = machine.value(instruction.input);
    Value<Real>& other = machine.value(instruction.other);
    const Value<Real>& out = machine.value(instruction.output);
    const Real factor = factor_of(machine, instruction);
    const auto pass_on = [&](Value<Real>& value, Real times) {
        if (!value.needed) return;
        for_positions(machine, value, [&](int64_t at, int64_t, int64_t) {
            give(load(out.gradient + at) * times, value.gathered, value.gradient + at);
        });
        value.gathered = true;
    };
    pass_on(in, Real{1});
    pass_on(other, factor);
}

}  // namespace
}  // namespace esper::tape
