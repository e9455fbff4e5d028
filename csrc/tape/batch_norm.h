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

// Mean and variance of a channel over its samples and positions.
struct Moments {
    double mean, variance;
};

// Numbers are centred by the first of their lane, so that one pass is as exact as two: that number is never farther
// from the lane's mean than the root of the positions times their deviation. Lanes are joined in float64.
template <typename Real>
Moments moments(Machine<Real>& machine, const Value<Real>& value, int64_t channel) {
    const auto positions = static_cast<double>(value.positions());
    machine.joined.resize(static_cast<size_t>(machine.groups * kLanes));
    double* means = machine.joined.data();  // of each sample
    double within = 0, sum = 0;
    for (int64_t g = 0; g < machine.groups; ++g) {
        const Real* plane = value.data + value.at(g, channel);
        const Lanes<Real> centre = load(plane);
        Lanes<Real> sums = splat(Real{}), squares = splat(Real{});
        for (int64_t i = 0; i < value.elements(); i += kLanes) {
            const Lanes<Real> x = load(plane + i) - centre;
            sums = sums + x;
            squares = fma(x, x, squares);
        }
        Real first[kLanes], total_of[kLanes], square_of[kLanes];
        store(centre, first);
        store(sums, total_of);
        store(squares, square_of);
        for (int64_t l = 0; l < machine.count(g); ++l) {
            const double shift = static_cast<double>(total_of[l]) / positions;
            const double mean = static_cast<double>(first[l]) + shift;
            within += static_cast<double>(square_of[l]) - static_cast<double>(total_of[l]) * shift;
            sum += mean;
            means[g * kLanes + l] = mean;
        }
    }
    const auto samples = static_cast<double>(machine.samples);
    const double mean = sum / samples;
    double between = 0;
    for (int64_t n = 0; n < machine.samples; ++n) between += (means[n] - mean) * (means[n] - mean);
    return {mean, (within / positions + between) / samples};
}

// How the numbers x of a channel are normalized: (x - centre) scale + shift.
template <typename Real>
struct Normal {
    Vector<Real> centre, scale, shift;

    ESPER_INLINE Vector<Real> operator()(const Vector<Real>& x) const { return fma(x - centre, scale, shift); }
};

// From the mean and 1 / deviation that a forward pass has saved.
template <typename Real>
Normal<Real> saved_normal(const Machine<Real>& machine, const BatchNorm& layer, const Value<Real>& in, int64_t c,
                          const Real* saved) {
    const Real weight = layer.weight < 0 ? Real{1} : machine.data(layer.weight)[c];
    const Real bias = layer.bias < 0 ? Real{} : machine.data(layer.bias)[c];
    return {splat_vector(saved[c]), splat_vector(saved[in.channels + c] * weight), splat_vector(bias)};
}

// Finds the statistics of a channel, and updates the running ones. `saved` keeps the mean and 1 / deviation.
template <typename Real>
Normal<Real> normal_of_channel(Machine<Real>& machine, const BatchNorm& layer, const Value<Real>& in, int64_t c,
                               double momentum, Real* saved) {
    const auto n = static_cast<double>(machine.samples * in.positions());
    Moments found;
    if (layer.of_batch(machine)) {
        found = moments(machine, in, c);
        if (machine.training && layer.mean >= 0) {
            Real& mean = machine.data(layer.mean)[c];
            Real& variance = machine.data(layer.variance)[c];
            mean = static_cast<Real>((1 - momentum) * static_cast<double>(mean) + momentum * found.mean);
            variance = static_cast<Real>((1 - momentum) * static_cast<double>(variance) +
                                         momentum * (found.variance * n / (n - 1)));
        }
    } else {
        found.mean = static_cast<double>(machine.data(layer.mean)[c]);
        found.variance = static_cast<double>(machine.data(layer.variance)[c]);
    }
    saved[c] = static_cast<Real>(found.mean);
    saved[in.channels + c] = static_cast<Real>(1 / std::sqrt(found.variance + layer.eps));
    return saved_normal(machine, layer, in, c, saved);
}

// Counts a batch of training; returns the share of its statistics in the running ones.
template <typename Real>
double count_batch(Machine<Real>& machine, const BatchNorm& layer) {
    const bool updates = layer.of_batch(machine) && machine.training && layer.mean >= 0;
    if (!updates || layer.batches < 0) return layer.momentum;
    auto* batches = static_cast<int64_t*>(machine.tensors[static_cast<size_t>(layer.batches)].data);
    *batches += 1;
    return std::isnan(layer.momentum) ? 1.0 / static_cast<double>(*batches) : layer.momentum;
}

// Normalizes a position, for the samples of a batch only: others lie far from the mean, and would grow from norm
// to norm until they overflow.
template <typename Real>
ESPER_INLINE Lanes<Real> normed(const Normal<Real>& normal, const Lanes<Real>& x, bool relu_follows, int64_t count) {
    const Lanes<Real> result =
        each(x, [&](const auto& numbers) __attribute__((always_inline)) { return normal(numbers); });
    return only(relu_follows ? relu(result) : result, count);
}

template <typename Real>
void batch_norm_forward(Machine<Real>& machine, const Instruction& instruction) {
    const BatchNorm layer(instruction);
    const Value<Real>& in = machine.value(instruction.input);
    const Value<Real>& out = machine.value(instruction.output);
    Real* saved = machine.kept(instruction, 2 * in.channels);
    const double momentum = count_batch(machine, layer);
    for (int64_t c = 0; c < in.channels; ++c) {
        const Normal<Real> normal = normal_of_channel(machine, layer, in, c, momentum, saved);
        for (int64_t g = 0; g < machine.groups; ++g) {
            const int64_t count = machine.count(g), first = in.at(g, c);
            for (int64_t at = first; at < first + in.elements(); at += kLanes) {
                store(normed(normal, load(in.data + at), layer.relu, count), out.data + at);
            }
        }
    }
}

// What the backward pass subtracts from the gradient d of a normalized number x: (d - mean - (x - centre) slope) scale.
template <typename Real>
struct NormGradient {
    Lanes<Real> centre, scale, mean, slope;

    ESPER_INLINE Lanes<Real> operator()(const Lanes<Real>& x, const Lanes<Real>& d) const {
        return (d - mean - (x - centre) * slope) * scale;
    }
};

// Writes the gradients of weight and bias from the sums of the gradient and of gradient × centred number.
template <typename Real>
NormGradient<Real> norm_gradient(Machine<Real>& machine, const BatchNorm& layer, const Value<Real>& in, int64_t c,
                                 const Real* saved, double sum, double product) {
    const auto n = static_cast<double>(machine.samples * in.positions());
    const Real weight = layer.weight < 0 ? Real{1} : machine.data(layer.weight)[c];
    const Real deviation = saved[in.channels + c];
    if (layer.weight >= 0 && machine.gradient(layer.weight) != nullptr) {
        machine.gradient(layer.weight)[c] = static_cast<Real>(product * static_cast<double>(deviation));
    }
    if (layer.bias >= 0 && machine.gradient(layer.bias) != nullptr) {
        machine.gradient(layer.bias)[c] = static_cast<Real>(sum);
    }
    NormGradient<Real> result{splat(saved[c]), splat(deviation * weight), splat(Real{}), splat(Real{})};
    if (layer.of_batch(machine)) {
        result.mean = splat(static_cast<Real>(sum / n));
        result.slope = splat(static_cast<Real>(product / n * static_cast<double>(deviation * deviation)));
    }
    return result;
}

// The sums of a channel's gradients d, and of d × centred number.
template <typename Real>
struct GradientSums {
    explicit GradientSums(const Lanes<Real>& channel_centre) : centre(channel_centre) {}

    ESPER_INLINE void add(const Lanes<Real>& x, const Lanes<Real>& d) {
        sums = sums + d;
        products = fma(d, x - centre, products);
    }
    // Ends the plane of a group with `count` samples.
    ESPER_INLINE void join(int64_t count) {
        sum += total(sums);
        product += total(only(products, count));
        sums = products = splat(Real{});
    }

    Lanes<Real> centre;
    Lanes<Real> sums = splat(Real{}), products = splat(Real{});
    double sum = 0, product = 0;
};

template <typename Real>
void batch_norm_backward(Machine<Real>& machine, const Instruction& instruction) {
    const BatchNorm layer(instruction);
    Value<Real>& in = machine.value(instruction.input);
    const Value<Real>& out = machine.value(instruction.output);
    const Real* saved = machine.kept(instruction, 2 * in.channels);
    for (int64_t c = 0; c < in.channels; ++c) {
        GradientSums<Real> sums(splat(saved[c]));
        for (int64_t g = 0; g < machine.groups; ++g) {
            const int64_t first = in.at(g, c);
            for (int64_t at = first; at < first + in.elements(); at += kLanes) {
                Lanes<Real> d = load(out.gradient + at);
                if (layer.relu) {
                    d = relu_gradient(load(out.data + at), d);
                    store(d, out.gradient + at);
                }
                sums.add(load(in.data + at), d);
            }
            sums.join(machine.count(g));
        }
        const NormGradient<Real> gradient = norm_gradient(machine, layer, in, c, saved, sums.sum, sums.product);
        if (!in.needed) continue;
        for (int64_t g = 0; g < machine.groups; ++g) {
            const int64_t count = machine.count(g), first = in.at(g, c);
            for (int64_t at = first; at < first + in.elements(); at += kLanes) {
                const Lanes<Real> result = gradient(load(in.data + at), load(out.gradient + at));
                give(only(result, count), in.gathered, in.gradient + at);
            }
        }
    }
    if (in.needed) in.gathered = true;
}

}  // namespace
}  // namespace esper::tape
