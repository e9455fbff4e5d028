// BatchNorm of [B, C, H, W] or [B, C], with a ReLU behind it if there is one.
//
// numbers: weight, bias, running mean, running variance and number of batches (an int64 tensor), -1 for a tensor that
// the layer lacks; whether it uses its running statistics in training, too; whether a ReLU follows.
// constants: eps, momentum (NaN: the cumulative average).
#pragma once

#include <cmath>

#include "machine.h"

namespace esper::tape {
namespace {

struct BatchNorm {
    explicit BatchNorm(const Instruction& i)
        : weight(i.number[0]),
          bias(i.number[1]),
          mean(i.number[2]),
          variance(i.number[3]),
          batches(i.number[4]),
          fixed(i.number[5] != 0),
          relu(i.number[6] != 0),
          eps(i.constant[0]),
          momentum(i.constant[1]) {}
    int64_t weight, bias, mean, variance, batches;
    bool fixed, relu;
    double eps, momentum;

    template <typename Real>
    bool of_batch(const Machine<Real>& machine) const {
        return mean < 0 || (machine.training && !fixed);
    }
};

// Sums over the samples and positions of a channel, in float64 over groups.
struct Moments {
    double sum = 0;      // of x - centre
    double squares = 0;  // of its square
};

template <typename Real>
Moments moments(const Machine<Real>& machine, const Value<Real>& value, int64_t channel, double centre) {
    const Lanes<Real> middle = splat(static_cast<Real>(centre));
    Moments result;
    for (int64_t g = 0; g < machine.groups; ++g) {
        Lanes<Real> sums = splat(Real{}), squares = splat(Real{});
        for_rows(value, [&](int64_t offset, int64_t elements) __attribute__((always_inline)) {
            const Real* row = value.data + value.at(g, channel) + offset;
            for (int64_t i = 0; i < elements; i += kLanes) {
                const Lanes<Real> x = load(row + i) - middle;
                sums = sums + x;
                squares = fma(x, x, squares);
            }
        });
        const int64_t count = machine.count(g);
        result.sum += total(only(sums, count));
        result.squares += total(only(squares, count));
    }
    return result;
}

template <typename Real>
void batch_norm_forward(Machine<Real>& machine, const Instruction& instruction) {
    const BatchNorm layer(instruction);
    const Value<Real>& in = machine.value(instruction.input);
    const Value<Real>& out = machine.value(instruction.output);
    Real* saved = machine.kept(instruction, 2 * in.channels);
    const auto n = static_cast<double>(machine.samples * in.positions());
    const bool of_batch = layer.of_batch(machine);
    const bool updates = of_batch && machine.training && layer.mean >= 0;
    double momentum = layer.momentum;
    if (updates && layer.batches >= 0) {
        auto* batches = static_cast<int64_t*>(machine.tensors[static_cast<size_t>(layer.batches)].data);
        *batches += 1;
        if (std::isnan(momentum)) momentum = 1.0 / static_cast<double>(*batches);
    }
    for (int64_t c = 0; c < in.channels; ++c) {
        double mean, variance;
        if (of_batch) {
            // The first mean is as exact as sums of lanes are; what is left of it corrects both.
            const double centre = static_cast<double>(static_cast<Real>(moments(machine, in, c, 0).sum / n));
            const Moments centred = moments(machine, in, c, centre);
            mean = centre + centred.sum / n;
            variance = centred.squares / n - centred.sum / n * (centred.sum / n);
        } else {
            mean = static_cast<double>(machine.data(layer.mean)[c]);
            variance = static_cast<double>(machine.data(layer.variance)[c]);
        }
        if (updates) {
            Real& running_mean = machine.data(layer.mean)[c];
            Real& running_variance = machine.data(layer.variance)[c];
            running_mean = static_cast<Real>((1 - momentum) * static_cast<double>(running_mean) + momentum * mean);
            running_variance = static_cast<Real>((1 - momentum) * static_cast<double>(running_variance) +
                                                 momentum * (variance * n / (n - 1)));
        }
        const double deviation = 1 / std::sqrt(variance + layer.eps);
        saved[c] = static_cast<Real>(mean);
        saved[in.channels + c] = static_cast<Real>(deviation);
        const Real weight = layer.weight < 0 ? Real{1} : machine.data(layer.weight)[c];
        const Real bias = layer.bias < 0 ? Real{} : machine.data(layer.bias)[c];
        const Lanes<Real> scale = splat(saved[in.channels + c] * weight);
        const Lanes<Real> centre = splat(saved[c]);
        const Lanes<Real> shift = splat(bias);
        for (int64_t g = 0; g < machine.groups; ++g) {
            const int64_t count = machine.count(g);
            for (int64_t y = 0; y < in.height; ++y) {
                const Real* from = in.data + in.at(g, c) + y * in.row();
                Real* to = out.data + out.at(g, c) + y * out.row();
                for (int64_t x = 0; x < in.width * kLanes; x += kLanes) {
                    const Lanes<Real> result = fma(load(from + x) - centre, scale, shift);
                    // Lanes without a sample lie far from the mean, and would grow from norm to norm until they
                    // overflow.
                    store(only(layer.relu ? relu(result) : result, count), to + x);
                }
            }
        }
    }
}

template <typename Real>
void batch_norm_backward(Machine<Real>& machine, const Instruction& instruction) {
    const BatchNorm layer(instruction);
    Value<Real>& in = machine.value(instruction.input);
    const Value<Real>& out = machine.value(instruction.output);
    const Real* saved = machine.kept(instruction, 2 * in.channels);
    const auto n = static_cast<double>(machine.samples * in.positions());
    for (int64_t c = 0; c < in.channels; ++c) {
        const Real weight = layer.weight < 0 ? Real{1} : machine.data(layer.weight)[c];
        const Lanes<Real> centre = splat(saved[c]);
        const Real deviation = saved[in.channels + c];
        double sum = 0, product = 0;  // of the gradient, and of gradient times centred input
        for (int64_t g = 0; g < machine.groups; ++g) {
            Lanes<Real> sums = splat(Real{}), products = splat(Real{});
            for (int64_t y = 0; y < in.height; ++y) {
                const Real* x = in.data + in.at(g, c) + y * in.row();
                const Real* result = out.data + out.at(g, c) + y * out.row();
                Real* gradient = out.gradient + out.at(g, c) + y * out.row();
                for (int64_t i = 0; i < in.width * kLanes; i += kLanes) {
                    Lanes<Real> d = load(gradient + i);
                    if (layer.relu) {
                        d = relu_gradient(load(result + i), d);
                        store(d, gradient + i);
                    }
                    sums = sums + d;
                    products = fma(d, load(x + i) - centre, products);
                }
            }
            sum += total(sums);
            product += total(only(products, machine.count(g)));
        }
        if (layer.weight >= 0 && machine.gradient(layer.weight) != nullptr) {
            machine.gradient(layer.weight)[c] = static_cast<Real>(product * static_cast<double>(deviation));
        }
        if (layer.bias >= 0 && machine.gradient(layer.bias) != nullptr) {
            machine.gradient(layer.bias)[c] = static_cast<Real>(sum);
        }
        if (!in.needed) continue;
        const Lanes<Real> scale = splat(deviation * weight);
        Lanes<Real> mean = splat(Real{}), slope = splat(Real{});
        if (layer.of_batch(machine)) {
            mean = splat(static_cast<Real>(sum / n));
            slope = splat(static_cast<Real>(product / n * static_cast<double>(deviation * deviation)));
        }
        for (int64_t g = 0; g < machine.groups; ++g) {
            const int64_t count = machine.count(g);
            for (int64_t y = 0; y < in.height; ++y) {
                const int64_t from = in.at(g, c) + y * in.row();
                const Real* gradient = out.gradient + out.at(g, c) + y * out.row();
                for (int64_t i = 0; i < in.width * kLanes; i += kLanes) {
                    const Lanes<Real> x = load(in.data + from + i) - centre;
                    const Lanes<Real> d = load(gradient + i) - mean - x * slope;
                    give(only(d * scale, count), in.gathered, in.gradient + from + i);
                }
            }
        }
    }
    if (in.needed) in.gathered = true;
}

}  // namespace
}  // namespace esper::tape
