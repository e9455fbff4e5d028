// A whole pass over a tape: which layer runs when, and how samples come in and out.
#pragma once

#include "batch_norm.h"
#include "convolution.h"
#include "elementwise.h"
#include "group_norm.h"
#include "kernels.h"
#include "pool.h"

namespace esper::tape {
namespace {

template <typename Real>
void run_forward(Machine<Real>& machine) {
    for (const Instruction& i : machine.code) {
        switch (i.layer) {
            case kConvolution:
                convolution_forward(machine, i);
                break;
            case kBatchNorm:
                batch_norm_forward(machine, i);
                break;
            case kGroupNorm:
                group_norm_forward(machine, i);
                break;
            case kActivation:
                activation_forward(machine, i);
                break;
            case kMaxPool:
                max_pool_forward(machine, i);
                break;
            case kAveragePool:
                average_pool_forward(machine, i);
                break;
            case kFlatten:
                flatten_forward(machine, i);
                break;
            case kScale:
                scale_forward(machine, i);
                break;
            case kMultiply:
                multiply_forward(machine, i);
                break;
            default:
                add_forward(machine, i);
                break;
        }
    }
}

template <typename Real>
void run_backward(Machine<Real>& machine) {
    for (size_t n = machine.code.size(); n-- > 0;) {
        const Instruction& i = machine.code[n];
        if (!machine.value(i.output).gathered) continue;  // nothing that is wanted depends on it
        switch (i.layer) {
            case kConvolution:
                convolution_backward(machine, i);
                break;
            case kBatchNorm:
                batch_norm_backward(machine, i);
                break;
            case kGroupNorm:
                group_norm_backward(machine, i);
                break;
            case kActivation:
                activation_backward(machine, i);
                break;
            case kMaxPool:
                max_pool_backward(machine, i);
                break;
            case kAveragePool:
                average_pool_backward(machine, i);
                break;
            case kFlatten:
                flatten_backward(machine, i);
                break;
            case kScale:
                scale_backward(machine, i);
                break;
            case kMultiply:
                multiply_backward(machine, i);
                break;
            default:
                add_backward(machine, i);
                break;
        }
    }
}

// Places for the values in `memory`, whose numbers are all zero; counts them only if it is null.
template <typename Real>
int64_t lay_out(Machine<Real>& machine, Real* memory) {
    int64_t used = 0;
    for (Value<Real>& value : machine.values) {
        const int64_t numbers = machine.groups * value.group();
        if (memory != nullptr) value.data = memory + used;
        used += numbers;
        if (!value.needed) continue;
        if (memory != nullptr) value.gradient = memory + used;
        used += numbers;
    }
    return used;
}

// Finds the borders of values and which gradients are wanted.
template <typename Real>
void prepare(Machine<Real>& machine, bool input_gradient) {
    machine.groups = (machine.samples + kLanes - 1) / kLanes;
    machine.saved.resize(machine.code.size());
    machine.values[0].needed = input_gradient;
    for (const Instruction& i : machine.code) {
        Value<Real>& in = machine.value(i.input);
        Value<Real>& out = machine.value(i.output);
        if (i.layer == kConvolution) {
            const Convolution layer(i);
            in.border = std::max(in.border, layer.input_border());
            out.border = std::max(out.border, layer.gradient_border({in.height, in.width}, {out.height, out.width}));
        }
        out.needed = out.needed || in.needed || (i.other >= 0 && machine.value(i.other).needed);
        const int64_t parameters = i.layer == kScale ? 1 : i.layer <= kGroupNorm ? 2 : 0;
        for (int64_t p = 0; p < parameters; ++p) {
            if (i.number[p] >= 0 && machine.gradient(i.number[p]) != nullptr) out.needed = true;
        }
    }
}

// Between [B, C, H, W], which is contiguous, and the lanes of a value.
template <typename Real, bool kIn>
void move_samples(const Machine<Real>& machine, const Value<Real>& value, Real* lanes, Real* samples) {
    for (int64_t n = 0; n < machine.samples; ++n) {
        for (int64_t c = 0; c < value.channels; ++c) {
            Real* plane = lanes + value.at(n / kLanes, c) + n % kLanes;
            for (int64_t y = 0; y < value.height; ++y) {
                for (int64_t x = 0; x < value.width; ++x) {
                    Real& lane = plane[y * value.row() + x * kLanes];
                    if constexpr (kIn) {
                        lane = *samples++;
                    } else {
                        *samples++ = lane;
                    }
                }
            }
        }
    }
}

template <typename Real>
void pass_of(const Pass& pass) {
    Machine<Real> machine;
    machine.code.assign(pass.code, pass.code + pass.instructions);
    machine.tensors.assign(pass.tensors, pass.tensors + pass.tensor_count);
    machine.samples = pass.samples;
    machine.training = pass.training;
    for (int64_t v = 0; v < pass.value_count; ++v) {
        Value<Real> value;
        value.channels = pass.shapes[3 * v];
        value.height = pass.shapes[3 * v + 1];
        value.width = pass.shapes[3 * v + 2];
        machine.values.push_back(value);
    }
    prepare(machine, pass.input_gradient != nullptr);
    // Kept for the next pass of this thread, so that memory is mapped once.
    static thread_local std::vector<Real> memory;
    const auto numbers = static_cast<size_t>(lay_out<Real>(machine, nullptr));
    if (memory.size() < numbers) memory.resize(numbers);
    std::fill_n(memory.data(), numbers, Real{});
    lay_out(machine, memory.data());

    Value<Real>& in = machine.values.front();
    Value<Real>& out = machine.values.back();
    move_samples<Real, true>(machine, in, in.data, static_cast<Real*>(pass.input));
    run_forward(machine);
    move_samples<Real, false>(machine, out, out.data, static_cast<Real*>(pass.output));
    if (pass.output_gradient == nullptr || !out.needed) return;
    move_samples<Real, true>(machine, out, out.gradient, static_cast<Real*>(pass.output_gradient));
    // A parameter that the output does not depend on has a gradient of zero.
    for (const Tensor& tensor : machine.tensors) {
        if (tensor.gradient != nullptr) std::fill_n(static_cast<Real*>(tensor.gradient), tensor.elements, Real{});
    }
    out.gathered = true;
    run_backward(machine);
    if (pass.input_gradient != nullptr && in.gathered) {
        move_samples<Real, false>(machine, in, in.gradient, static_cast<Real*>(pass.input_gradient));
    }
}

void pass_on(const Pass& pass, bool is_double) {
    if (is_double) return pass_of<double>(pass);
    pass_of<float>(pass);
}

}  // namespace
}  // namespace esper::tape
