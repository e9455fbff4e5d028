// The two kernels of norm_relu_pool forward.
#pragma once

#include "norm_relu_pool.cuh"

namespace esper::norm_relu_pool {

// Sums of the distances to the first pixel, and of their squares. Each thread sums around its own first pixel.
template <typename Type, int V>
__global__ void __launch_bounds__(kThreads) moments_kernel(const __grid_constant__ Launch launch) {
    const Thread mine = this_thread<V>(launch);
    double sums[2 * V] = {};
    if (mine.active && mine.first < launch.pixels()) {
        float reference[V], pivot[V];
        load<Type>(launch.input, mine.channel, reference);
        load<Type>(launch.input, mine.first * launch.channels + mine.channel, pivot);
        float sum[V] = {}, sum_sq[V] = {};
        int64_t count = 0;
        for (int64_t start = mine.first; start < launch.pixels(); start += mine.step * kUnroll) {
            float value[kUnroll][V];
#pragma unroll
            for (int u = 0; u < kUnroll; ++u) {
                const int64_t pixel = start + u * mine.step;
                if (pixel < launch.pixels()) {
                    load<Type>(launch.input, pixel * launch.channels + mine.channel, value[u]);
                }
            }
#pragma unroll
            for (int u = 0; u < kUnroll; ++u) {
                if (start + u * mine.step < launch.pixels()) {
                    count += 1;
#pragma unroll
                    for (int k = 0; k < V; ++k) {
                        const float d = value[u][k] - pivot[k];
                        sum[k] += d;
                        sum_sq[k] = multiply_add(d, d, sum_sq[k]);
                    }
                }
            }
        }
#pragma unroll
        for (int k = 0; k < V; ++k) {
            const double distance = static_cast<double>(pivot[k]) - static_cast<double>(reference[k]);
            const PivotSums total = rebased(static_cast<double>(count), distance, sum[k], sum_sq[k]);
            sums[2 * k] = total.sum;
            sums[2 * k + 1] = total.sum_sq;
        }
    }
    write_partials<V>(launch, sums);
}

// Statistics of one channel, from the sums over the batch or the running ones.
template <typename Type>
__device__ Statistics channel_statistics(const Launch& launch, int64_t channel, const double* totals) {
    if (!launch.batch_statistics) {
        return running_statistics(launch.running_mean[channel], launch.running_variance[channel], launch.eps);
    }
    if (launch.pixels() == 0) return Statistics{};
    const double reference = Type::value(static_cast<const typename Type::Storage*>(launch.input)[channel]);
    return statistics_of(moments_of(static_cast<double>(launch.pixels()), reference, totals[0], totals[1]), launch.eps);
}

template <typename Type, int V, bool kPool>
__global__ void __launch_bounds__(kThreads) normalise_kernel(const __grid_constant__ Launch launch) {
    __shared__ double totals[2 * kMaxChannels];
    __shared__ float scales[kMaxChannels];
    __shared__ float shifts[kMaxChannels];
    if (launch.batch_statistics) add_partials<V>(launch, totals);
    const int local = static_cast<int>(threadIdx.x);
    const int64_t channel = static_cast<int64_t>(blockIdx.y) * launch.columns * V + local;
    if (local < launch.columns * V && channel < launch.channels) {
        const Statistics row = channel_statistics<Type>(launch, channel, totals + 2 * local);
        const Affine affine = affine_of(row.mean, row.inv_std, launch.weight[channel], launch.bias[channel]);
        scales[local] = affine.scale;
        shifts[local] = affine.shift;
        if (blockIdx.x == 0) {
            launch.statistics[kMean * launch.channels + channel] = row.mean;
            launch.statistics[kInvStd * launch.channels + channel] = row.inv_std;
            launch.statistics[kVariance * launch.channels + channel] = row.variance;
        }
    }
    __syncthreads();

    const Thread mine = this_thread<V>(launch);
    if (!mine.active) return;
    float scale[V], shift[V];
    read(scales, mine, scale);
    read(shifts, mine, shift);
    const int64_t count = kPool ? launch.windows() : launch.pixels();
    for (int64_t index = mine.first; index < count; index += mine.step) {
        float value[V];
        if constexpr (kPool) {
            const Window window = window_of(launch, index);
            if (!window.right || !window.below) continue;
            float best[V];
            int choice[V];
#pragma unroll
            for (int place = 0; place < 4; ++place) {
                const int64_t pixel = window.corner + offset_of(launch, place);
                load<Type>(launch.input, pixel * launch.channels + mine.channel, value);
#pragma unroll
                for (int k = 0; k < V; ++k) {
                    const float y = Type::value(Type::storage(relu(normalised(value[k], scale[k], shift[k]))));
                    if (place == 0) {
                        best[k] = y;
                        choice[k] = 0;
                    } else {
                        choose(best[k], choice[k], y, place);
                    }
                }
            }
            Bytes<V> bytes;
#pragma unroll
            for (int k = 0; k < V; ++k) bytes.byte[k] = static_cast<uint8_t>(alive_choice(best[k], choice[k]));
            const int64_t at = window.pooled * launch.channels + mine.channel;
            store<Type>(launch.result, at, best);
            *reinterpret_cast<Bytes<V>*>(launch.choice + at) = bytes;
        } else {
            const int64_t at = index * launch.channels + mine.channel;
            load<Type>(launch.input, at, value);
#pragma unroll
            for (int k = 0; k < V; ++k) value[k] = relu(normalised(value[k], scale[k], shift[k]));
            store<Type>(launch.result, at, value);
        }
    }
}

}  // namespace esper::norm_relu_pool
