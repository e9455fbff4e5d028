// A linear layer of vectors [B, D], which have one position: products of matrices with samples in lanes.
//
// numbers: weight [outputs, inputs], bias [outputs] (-1: none).
#pragma once

#include "machine.h"
#include "product.h"

namespace esper::tape {
namespace {

constexpr int64_t kGroupsTogether = 16;  // whose products are summed in float before they join in float64

// The sum of each channel's gradient over samples, in float64.
template <typename Real>
void bias_gradient(const Machine<Real>& machine, const Value<Real>& out, Real* result) {
    for (int64_t c = 0; c < out.channels; ++c) {
        double sum = 0;
        for (int64_t g = 0; g < machine.groups; ++g) {
            const Real* plane = out.gradient + out.at(g, c);
            Lanes<Real> lanes = splat(Real{});
            for (int64_t i = 0; i < out.elements(); i += kLanes) lanes = lanes + load(plane + i);
            sum += total(lanes);
        }
        result[c] = static_cast<Real>(sum);
    }
}

template <typename Real>
void linear_forward(Machine<Real>& machine, const Instruction& instruction) {
    const Value<Real>& in = machine.value(instruction.input);
    const Value<Real>& out = machine.value(instruction.output);
    const Tensor& weight = machine.tensors[static_cast<size_t>(instruction.number[0])];
    const Factors<Real> factors{static_cast<const Real*>(weight.data), weight.strides[0], weight.strides[1]};
    for (int64_t g = 0; g < machine.groups; ++g) {
        const Rows<const Real> x{in.data + in.at(g, 0), in.plane()};
        const Rows<Real> to{out.data + out.at(g, 0), out.plane()};
        if (instruction.number[1] < 0) {
            product<Real>(factors, out.channels, x, in.channels, to);
        } else {
            const Real* bias = machine.data(instruction.number[1]);
            product<Real, Start::kBias>(factors, out.channels, x, in.channels, to, bias);
        }
    }
}

template <typename Real>
void linear_input_gradient(const Tensor& weight, Machine<Real>& machine, Value<Real>& in, const Value<Real>& out) {
    // Transposed: a column of the weights would use the same few sets of the cache.
    machine.packed.resize(static_cast<size_t>(in.channels * out.channels));
    for (int64_t o = 0; o < out.channels; ++o) {
        const Real* row = static_cast<const Real*>(weight.data) + o * weight.strides[0];
        Real* column = machine.packed.data() + o;
        for (int64_t i = 0; i < in.channels; ++i) column[i * out.channels] = row[i * weight.strides[1]];
    }
    const Factors<Real> factors{machine.packed.data(), out.channels, 1};
    for (int64_t g = 0; g < machine.groups; ++g) {
        const Rows<const Real> x{out.gradient + out.at(g, 0), out.plane()};
        const Rows<Real> to{in.gradient + in.at(g, 0), in.plane()};
        if (in.gathered) {
            product<Real, Start::kResult>(factors, in.channels, x, out.channels, to);
        } else {
            product<Real>(factors, in.channels, x, out.channels, to);
        }
    }
    in.gathered = true;
}

// The gradient of weight (o, i) is the sum over samples of out (o) times in (i). Inputs are transposed, so that 16 of
// them are in lanes, [samples][16]; the gradient of the output is copied to [outputs][samples].
template <typename Real>
void linear_weight_gradient(const Tensor& weight, Machine<Real>& machine, const Value<Real>& in,
                            const Value<Real>& out) {
    const int64_t tiles = (in.channels + kLanes - 1) / kLanes;
    const int64_t most = std::min(kGroupsTogether, machine.groups) * kLanes;
    const int64_t width = most + kLanes;  // 16 more, so that rows do not share sets of the cache
    machine.packed.assign(static_cast<size_t>(most * kLanes + out.channels * (width + kLanes) + kLanes * kLanes),
                          Real{});
    Real* const turned = machine.packed.data();
    Real* const rows = turned + most * kLanes;
    Real* const sums = rows + out.channels * width;
    Real* const edge = sums + out.channels * kLanes;  // the last inputs of a group, with rows of zeros up to 16
    machine.joined.assign(static_cast<size_t>(out.channels * tiles * kLanes), 0.0);
    for (int64_t first = 0; first < machine.groups; first += kGroupsTogether) {
        const int64_t last = std::min(first + kGroupsTogether, machine.groups);
        const int64_t samples = std::min(machine.samples, last * kLanes) - first * kLanes;
        for (int64_t g = first; g < last; ++g) {
            for (int64_t o = 0; o < out.channels; ++o) {
                std::copy_n(out.gradient + out.at(g, o), kLanes, rows + o * width + (g - first) * kLanes);
            }
        }
        for (int64_t tile = 0; tile < tiles; ++tile) {
            const int64_t inputs = std::min<int64_t>(kLanes, in.channels - tile * kLanes);
            for (int64_t g = first; g < last; ++g) {
                Rows<const Real> from{in.data + in.at(g, tile * kLanes), in.plane()};
                if (inputs < kLanes) {
                    for (int64_t i = 0; i < inputs; ++i) {
                        std::copy_n(from.data + i * from.stride, kLanes, edge + i * kLanes);
                    }
                    from = {edge, kLanes};
                }
                transpose<Real>(from, kLanes, {turned + (g - first) * kLanes * kLanes, kLanes});
            }
            product<Real>({rows, width, 1}, out.channels, {turned, kLanes}, samples, {sums, kLanes});
            double* joined = machine.joined.data() + tile * out.channels * kLanes;
            for (int64_t n = 0; n < out.channels * kLanes; ++n) joined[n] += static_cast<double>(sums[n]);
        }
    }
    auto* result = static_cast<Real*>(weight.gradient);
    for (int64_t o = 0; o < out.channels; ++o) {
        for (int64_t i = 0; i < in.channels; ++i) {
            const int64_t at = (i / kLanes * out.channels + o) * kLanes + i % kLanes;
            result[o * weight.strides[0] + i * weight.strides[1]] =
                static_cast<Real>(machine.joined[static_cast<size_t>(at)]);
        }
    }
}

template <typename Real>
void linear_backward(Machine<Real>& machine, const Instruction& instruction) {
    Value<Real>& in = machine.value(instruction.input);
    const Value<Real>& out = machine.value(instruction.output);
    const Tensor& weight = machine.tensors[static_cast<size_t>(instruction.number[0])];
    if (weight.gradient != nullptr) linear_weight_gradient(weight, machine, in, out);
    if (instruction.number[1] >= 0 && machine.gradient(instruction.number[1]) != nullptr) {
        bias_gradient(machine, out, machine.gradient(instruction.number[1]));
    }
    if (in.needed) linear_input_gradient(weight, machine, in, out);
}

}  // namespace
}  // namespace esper::tape
