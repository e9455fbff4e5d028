// GroupNorm of [B, C, H, W] or [B, C], and LayerNorm of [B, C], which is one group; with a ReLU behind it if there is
// one. Statistics are those of a sample, so they are lanes themselves.
//
// numbers: weight, bias (-1: none), groups of channels, whether a ReLU follows. constants: eps.
#pragma once

#include "machine.h"

namespace esper::tape {
namespace {

struct GroupNorm {
    explicit GroupNorm(const Instruction& i)
        : weight(i.number[0]), bias(i.number[1]), groups(i.number[2]), relu(i.number[3] != 0), eps(i.constant[0]) {}
    int64_t weight, bias, groups;
    bool relu;
    double eps;
};

// Sums body(offset) over the positions of some channels of a group of samples.
template <typename Real, typename Body>
ESPER_INLINE Lanes<Real> group_sum(const Value<Real>& value, int64_t g, int64_t first, int64_t channels,
                                   const Body& body) {
    Lanes<Real> sum = splat(Real{});
    for (int64_t c = first; c < first + channels; ++c) {
        const int64_t plane = value.at(g, c);
        for (int64_t i = 0; i < value.elements(); i += kLanes) sum = sum + body(plane + i);
    }
    return sum;
}

template <typename Real>
ESPER_INLINE Lanes<Real> inverse_root(const Lanes<Real>& a) {
    return by_lane(a, [](Real x) { return Real{1} / std::sqrt(x); });
}

template <typename Real>
void group_norm_forward(Machine<Real>& machine, const Instruction& instruction) {
    const GroupNorm layer(instruction);
    const Value<Real>& in = machine.value(instruction.input);
    const Value<Real>& out = machine.value(instruction.output);
    const int64_t channels = in.channels / layer.groups;
    const Real share = Real{1} / static_cast<Real>(channels * in.positions());
    Real* saved = machine.kept(instruction, 2 * machine.groups * layer.groups * kLanes);
    for (int64_t g = 0; g < machine.groups; ++g) {
        for (int64_t k = 0; k < layer.groups; ++k) {
            const Lanes<Real> mean =
                group_sum(in, g, k * channels, channels,
                          [&](int64_t at) __attribute__((always_inline)) { return load(in.data + at); }) *
                share;
            const auto square = [&](int64_t at) __attribute__((always_inline)) {
                const Lanes<Real> centred = load(in.data + at) - mean;
                return centred * centred;
            };
            const Lanes<Real> variance = group_sum(in, g, k * channels, channels, square) * share;
            const Lanes<Real> deviation = inverse_root(variance + splat(static_cast<Real>(layer.eps)));
            store(mean, saved);
            store(deviation, saved + kLanes);
            saved += 2 * kLanes;
            for (int64_t c = k * channels; c < (k + 1) * channels; ++c) {
                const Lanes<Real> weight = splat(layer.weight < 0 ? Real{1} : machine.data(layer.weight)[c]);
                const Lanes<Real> bias = splat(layer.bias < 0 ? Real{} : machine.data(layer.bias)[c]);
                for (int64_t at = in.at(g, c); at < in.at(g, c) + in.elements(); at += kLanes) {
                    const Lanes<Real> result = fma((load(in.data + at) - mean) * deviation, weight, bias);
                    store(layer.relu ? relu(result) : result, out.data + at);
                }
            }
        }
    }
}

template <typename Real>
void group_norm_backward(Machine<Real>& machine, const Instruction& instruction) {
    const GroupNorm layer(instruction);
    Value<Real>& in = machine.value(instruction.input);
    const Value<Real>& out = machine.value(instruction.output);
    const int64_t channels = in.channels / layer.groups;
    const Real share = Real{1} / static_cast<Real>(channels * in.positions());
    const Real* saved = machine.kept(instruction, 2 * machine.groups * layer.groups * kLanes);
    std::vector<double> sums(static_cast<size_t>(2 * in.channels));  // by channel: of the gradient, and times the input
    for (int64_t g = 0; g < machine.groups; ++g) {
        const int64_t count = machine.count(g);
        for (int64_t k = 0; k < layer.groups; ++k) {
            const Lanes<Real> mean = load(saved), deviation = load(saved + kLanes);
            saved += 2 * kLanes;
            const auto normed = [&](int64_t at)
                                    __attribute__((always_inline)) { return (load(in.data + at) - mean) * deviation; };
            Lanes<Real> sum = splat(Real{}), product = splat(Real{});  // weighted, over the channels
            for (int64_t c = k * channels; c < (k + 1) * channels; ++c) {
                Lanes<Real> of_channel = splat(Real{}), with_input = splat(Real{});
                for (int64_t at = in.at(g, c); at < in.at(g, c) + in.elements(); at += kLanes) {
                    Lanes<Real> d = load(out.gradient + at);
                    if (layer.relu) {
                        d = relu_gradient(load(out.data + at), d);
                        store(d, out.gradient + at);
                    }
                    of_channel = of_channel + d;
                    with_input = fma(d, normed(at), with_input);
                }
                const Lanes<Real> weight = splat(layer.weight < 0 ? Real{1} : machine.data(layer.weight)[c]);
                sum = fma(of_channel, weight, sum);
                product = fma(with_input, weight, product);
                sums[static_cast<size_t>(2 * c)] += total(of_channel);
                sums[static_cast<size_t>(2 * c + 1)] += total(only(with_input, count));
            }
            if (!in.needed) continue;
            sum = sum * share;
            product = product * share;
            for (int64_t c = k * channels; c < (k + 1) * channels; ++c) {
                const Lanes<Real> weight = splat(layer.weight < 0 ? Real{1} : machine.data(layer.weight)[c]);
                for (int64_t at = in.at(g, c); at < in.at(g, c) + in.elements(); at += kLanes) {
                    const Lanes<Real> d = load(out.gradient + at);
                    const Lanes<Real> result = (d * weight - sum - normed(at) * product) * deviation;
                    give(only(result, count), in.gathered, in.gradient + at);
                }
            }
        }
    }
    for (int64_t c = 0; c < in.channels; ++c) {
        if (layer.bias >= 0 && machine.gradient(layer.bias) != nullptr) {
            machine.gradient(layer.bias)[c] = static_cast<Real>(sums[static_cast<size_t>(2 * c)]);
        }
        if (layer.weight >= 0 && machine.gradient(layer.weight) != nullptr) {
            machine.gradient(layer.weight)[c] = static_cast<Real>(sums[static_cast<size_t>(2 * c + 1)]);
        }
    }
    if (in.needed) in.gathered = true;
}

}  // namespace
}  // namespace esper::tape
