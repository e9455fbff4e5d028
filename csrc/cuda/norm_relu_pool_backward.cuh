// The two kernels of norm_relu_pool backward.
#pragma once

#include "norm_relu_pool.cuh"

namespace esper::norm_relu_pool {

// Per-channel numbers of the block's tile, in shared memory.
struct TileAffine {
    float mean[kMaxChannels];
    float scale[kMaxChannels];
    float shift[kMaxChannels];
};

template <int V>
__device__ void read_affine(const Launch& launch, TileAffine& tile) {
    const int local = static_cast<int>(threadIdx.x);
    const int64_t channel = static_cast<int64_t>(blockIdx.y) * launch.columns * V + local;
    if (local < launch.columns * V && channel < launch.channels) {
        const float mean = launch.statistics[kMean * launch.channels + channel];
        const Affine affine = affine_of(mean, launch.statistics[kInvStd * launch.channels + channel],
                                        launch.weight[channel], launch.bias[channel]);
        tile.mean[local] = mean;
        tile.scale[local] = affine.scale;
        tile.shift[local] = affine.shift;
    }
    __syncthreads();
}

// The gradient of a window's output, and the place that it goes to.
template <int V>
struct Routed {
    float gradient[V];
    Bytes<V> choice;
};

template <typename Type, int V>
__device__ Routed<V> load_routed(const Launch& launch, const Window& window, const Thread& mine) {
    Routed<V> routed;
    const int64_t at = window.pooled * launch.channels + mine.channel;
    load<Type>(launch.gradient, at, routed.gradient);
    routed.choice = *reinterpret_cast<const Bytes<V>*>(launch.choice + at);
    return routed;
}

// Sums of g and g * (x - mean), g being the gradient of the normalisation's output. Places that get no gradient of a
// pool add 0, which changes no bit.
template <typename Type, int V, bool kPool>
__global__ void __launch_bounds__(kThreads) sums_kernel(const __grid_constant__ Launch launch) {
    __shared__ TileAffine tile;
    read_affine<V>(launch, tile);
    const Thread mine = this_thread<V>(launch);
    double sums[2 * V] = {};
    if (mine.active) {
        float mean[V], scale[V], shift[V];
        read(tile.mean, mine, mean);
        read(tile.scale, mine, scale);
        read(tile.shift, mine, shift);
        float sum[V] = {}, dot[V] = {};
        for (int64_t index = mine.first; index < launch.windows(); index += mine.step) {
            const Window window = window_of(launch, index);
            Routed<V> pooled;
            if constexpr (kPool) {
                if (!window.right || !window.below) continue;
                pooled = load_routed<Type, V>(launch, window, mine);
            }
#pragma unroll
            for (int place = 0; place < 4; ++place) {
                if (!has_place(window, place)) continue;
                const int64_t pixel = window.corner + offset_of(launch, place);
                const int64_t at = pixel * launch.channels + mine.channel;
                float value[V], gradient[V];
                load<Type>(launch.input, at, value);
                if constexpr (!kPool) load<Type>(launch.gradient, at, gradient);
#pragma unroll
                for (int k = 0; k < V; ++k) {
                    const float g = kPool ? routed(pooled.gradient[k], static_cast<int>(pooled.choice.byte[k]), place)
                                          : relu_gradient(gradient[k], normalised(value[k], scale[k], shift[k]),
                                                          Type::kRoundsToZero);
                    sum[k] += g;
                    dot[k] = multiply_add(g, value[k] - mean[k], dot[k]);
                }
            }
        }
#pragma unroll
        for (int k = 0; k < V; ++k) {
            sums[2 * k] = sum[k];
            sums[2 * k + 1] = dot[k];
        }
    }
    write_partials<V>(launch, sums);
}

template <typename Type, int V, bool kPool, bool kBatch>
__global__ void __launch_bounds__(kThreads) gradient_kernel(const __grid_constant__ Launch launch) {
    __shared__ double totals[2 * kMaxChannels];
    __shared__ TileAffine tile;
    __shared__ float slopes[kMaxChannels];
    __shared__ float offsets[kMaxChannels];
    add_partials<V>(launch, totals);
    read_affine<V>(launch, tile);
    const int local = static_cast<int>(threadIdx.x);
    const int64_t channel = static_cast<int64_t>(blockIdx.y) * launch.columns * V + local;
    if (local < launch.columns * V && channel < launch.channels) {
        const double sum = totals[2 * local];
        const double dot = totals[2 * local + 1];
        const float inv_std = launch.statistics[kInvStd * launch.channels + channel];
        const Slope slope = slope_of(sum, dot, static_cast<double>(launch.pixels()), inv_std, tile.scale[local]);
        slopes[local] = slope.slope;
        offsets[local] = slope.offset;
        if (blockIdx.x == 0) {
            launch.grad_weight[channel] = static_cast<float>(dot * inv_std);
            launch.grad_bias[channel] = static_cast<float>(sum);
        }
    }
    __syncthreads();

    const Thread mine = this_thread<V>(launch);
    if (!mine.active) return;
    float mean[V], scale[V], shift[V], slope[V], offset[V];
    read(tile.mean, mine, mean);
    read(tile.scale, mine, scale);
    read(tile.shift, mine, shift);
    read(slopes, mine, slope);
    read(offsets, mine, offset);
    const auto write = [&](int64_t at, const float (&value)[V], const float (&gradient)[V]) {
        float result[V];
#pragma unroll
        for (int k = 0; k < V; ++k) {
            result[k] = kBatch ? input_gradient(gradient[k], value[k], mean[k], scale[k], slope[k], offset[k])
                               : gradient[k] * scale[k];
        }
        store<Type>(launch.result, at, result);
    };
    const int64_t count = kPool ? launch.windows() : launch.pixels();
    for (int64_t index = mine.first; index < count; index += mine.step) {
        float value[V], gradient[V];
        if constexpr (kPool) {
            const Window window = window_of(launch, index);
            const bool whole = window.right && window.below;
            Routed<V> pooled;
            if (whole) pooled = load_routed<Type, V>(launch, window, mine);
#pragma unroll
            for (int place = 0; place < 4; ++place) {
                if (!has_place(window, place)) continue;
                const int64_t pixel = window.corner + offset_of(launch, place);
                const int64_t at = pixel * launch.channels + mine.channel;
                load<Type>(launch.input, at, value);
#pragma unroll
                for (int k = 0; k < V; ++k) {
                    gradient[k] =
                        whole ? routed(pooled.gradient[k], static_cast<int>(pooled.choice.byte[k]), place) : 0.0f;
                }
                write(at, value, gradient);
            }
        } else {
            const int64_t at = index * launch.channels + mine.channel;
            load<Type>(launch.input, at, value);
            load<Type>(launch.gradient, at, gradient);
#pragma unroll
            for (int k = 0; k < V; ++k) {
                gradient[k] = relu_gradient(gradient[k], normalised(value[k], scale[k], shift[k]), Type::kRoundsToZero);
            }
            write(at, value, gradient);
        }
    }
}
}  // namespace esper::norm_relu_pool
