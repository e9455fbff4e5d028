// The arithmetic of norm_relu_pool that the CPU and the CUDA kernel share. Plain C++ without torch.
//
// Per-element functions are templates: F is float on CUDA and a vector of floats on the CPU, I the integer of the same
// width. A comparison of vectors is a vector, which `?:` takes as it takes a bool.
#pragma once

#include <cmath>
#include <cstdint>

#include "host_device.h"

namespace esper::norm_relu_pool {

// Rows of `statistics` [kStatistics, C], float32. esper/ops/norm_relu_pool.py names them in the same order.
enum Statistic : int {
    kMean = 0,  // of the batch, or the running one
    kInvStd,    // 1 / sqrt(variance + eps), of the biased variance
    kVariance,  // unbiased, for the running variance
    kStatistics,
};

// `choice` of a pooled output: 0 to 3, the place in its window (row-major) that it was taken from, or kDead if ReLU
// made it zero, so that no gradient passes.
constexpr int kDead = 4;

// Sizes of a call. Tensors lie channels_last: [N, H, W, C] in memory.
struct Shape {
    int64_t batch;     // N
    int64_t height;    // H
    int64_t width;     // W
    int64_t channels;  // C
    bool pool;

    ESPER_HOST_DEVICE int64_t pixels() const { return batch * height * width; }
    // Odd rows and columns have no window, as in max_pool2d.
    int64_t out_height() const { return pool ? height / 2 : height; }
    int64_t out_width() const { return pool ? width / 2 : width; }
    int64_t out_elements() const { return batch * out_height() * out_width() * channels; }
};

// Per-channel arguments of forward.
struct Parameters {
    const float* weight;            // [C]
    const float* bias;              // [C]
    const float* running_mean;      // [C], or null for the batch's own statistics
    const float* running_variance;  // likewise
    double eps;
};

// Running statistics to be updated in place.
struct Running {
    float* mean;        // [C]
    float* variance;    // [C]
    int64_t* count;     // scalar: batches seen
    const float* rows;  // [kStatistics, C] of this batch
    int64_t channels;
    double momentum;  // negative for the average of all batches
};

// --- a channel -----------------------------------------------------------------------------------------------------

// Mean and sum of squared distances from it of `count` values. Doubles: a channel can have millions of values.
struct Moments {
    double count;
    double mean;
    double m2;
};

// Sums of distances to a pivot, and of their squares.
struct PivotSums {
    double sum;
    double sum_sq;
};

// The sums of `count` values around another pivot, `distance` below theirs.
ESPER_HOST_DEVICE PivotSums rebased(double count, double distance, double sum, double sum_sq) {
    return PivotSums{sum + count * distance, sum_sq + 2 * distance * sum + count * distance * distance};
}

// Moments of `count` values from sums of their distances to a pivot. For float32 sums the pivot is near the values, so
// that no digits are lost if the mean is large against the spread.
ESPER_HOST_DEVICE Moments moments_of(double count, double pivot, double sum, double sum_sq) {
    const double shift = sum / count;
    const double m2 = sum_sq - sum * shift;
    return Moments{count, pivot + shift, m2 < 0 ? 0 : m2};  // a NaN stays
}

struct Statistics {
    float mean;
    float inv_std;
    float variance;
};

ESPER_HOST_DEVICE Statistics statistics_of(const Moments& moments, double eps) {
    const double inv_std = 1 / sqrt(moments.m2 / moments.count + eps);
    return Statistics{static_cast<float>(moments.mean), static_cast<float>(inv_std),
                      static_cast<float>(moments.m2 / (moments.count - 1))};
}

ESPER_HOST_DEVICE Statistics running_statistics(float mean, float variance, double eps) {
    return Statistics{mean, static_cast<float>(1 / sqrt(static_cast<double>(variance) + eps)), variance};
}

// Updates a channel's running values after the `count`th batch.
ESPER_HOST_DEVICE void update_channel(const Running& running, int64_t channel, int64_t count) {
    const auto part = static_cast<float>(running.momentum < 0 ? 1.0 / static_cast<double>(count) : running.momentum);
    float& mean = running.mean[channel];
    float& variance = running.variance[channel];
    mean = (1 - part) * mean + part * running.rows[kMean * running.channels + channel];
    variance = (1 - part) * variance + part * running.rows[kVariance * running.channels + channel];
}

// y = x * scale + shift
struct Affine {
    float scale;
    float shift;
};

ESPER_HOST_DEVICE Affine affine_of(float mean, float inv_std, float weight, float bias) {
    const float scale = inv_std * weight;
    return Affine{scale, bias - mean * scale};
}

// dx = g * scale + (x - mean) * slope + offset, with g the gradient of the normalisation's output.
struct Slope {
    float slope;
    float offset;
};

// From the sums over the channel of g and of g * (x - mean).
ESPER_HOST_DEVICE Slope slope_of(double sum, double dot, double count, float inv_std, float scale) {
    const double variance_part = dot * inv_std * inv_std / count;
    return Slope{static_cast<float>(-variance_part * scale), static_cast<float>(-sum / count * scale)};
}

// --- an element ----------------------------------------------------------------------------------------------------

template <typename F>
ESPER_HOST_DEVICE F multiply_add(F a, F b, F c) {
#if defined(__CUDA_ARCH__)
    return __fmaf_rn(a, b, c);  // explicit, so that every kernel rounds alike
#else
    return a * b + c;
#endif
}

template <typename F>
ESPER_HOST_DEVICE F normalised(F x, F scale, F shift) {
    return multiply_add(x, scale, shift);
}

// max(y, 0); NaN stays, and -0 becomes 0.
template <typename F>
ESPER_HOST_DEVICE F relu(F y) {
    return y <= 0.0f ? F{} : y;
}

// The gradient g if relu(y), rounded to storage, is not zero, else 0. `rounds_to_zero` is the largest y that is zero.
template <typename F>
ESPER_HOST_DEVICE F relu_gradient(F g, F y, float rounds_to_zero) {
    return y <= rounds_to_zero ? F{} : g;
}

// Looks at place `place` of a window. As in PyTorch, the first of equal values wins, and the last NaN.
template <typename F, typename I>
ESPER_HOST_DEVICE void choose(F& best, I& choice, F value, int place) {
    const auto wins = (value > best) | (value != value);
    best = wins ? value : best;
    choice = wins ? I{} + place : choice;
}

// The choice as it is stored.
template <typename F, typename I>
ESPER_HOST_DEVICE I alive_choice(F best, I choice) {
    return best <= 0.0f ? I{} + kDead : choice;
}

// The gradient that place `place` of a window gets.
template <typename F, typename I>
ESPER_HOST_DEVICE F routed(F g, I choice, int place) {
    return choice == place ? g : F{};
}

// dx of a batch that was normalised with its own statistics.
template <typename F>
ESPER_HOST_DEVICE F input_gradient(F g, F x, F mean, F scale, F slope, F offset) {
    return multiply_add(g, scale, multiply_add(x - mean, slope, offset));
}

}  // namespace esper::norm_relu_pool
