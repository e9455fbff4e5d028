// How the CUDA kernels of norm_relu_pool share their work among threads, and how they add in a fixed order.
#pragma once

#include <cstdint>
#include <cstring>

#include "../norm_relu_pool.h"
#include "elements.cuh"

namespace esper::norm_relu_pool {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kUnroll = 4;             // loads in flight per thread in the sum of the statistics
constexpr int kMaxChannels = 64;       // of a tile
constexpr int64_t kSumBlocks = 132;    // max over all tiles: the next launch adds as many rows
constexpr int64_t kApplyBlocks = 528;  // max over all tiles, in the second launch

// One call. X is `columns`.
struct Launch : Shape, Parameters {
    const void* input;     // [N, H, W, C]
    const void* gradient;  // [N, OH, OW, C] of the output
    void* result;          // [N, OH, OW, C], or [N, H, W, C] for the input's gradient
    uint8_t* choice;       // [N, OH, OW, C]
    float* statistics;     // [kStatistics, C], written forward and read backward
    float* grad_weight;    // [C]
    float* grad_bias;      // [C]
    double* partials;      // [rows, tiles, X * V, 2]
    int columns;           // of a tile: 1, 2, 4, 8, 16 or 32
    int tiles;
    int rows;  // of partial sums
    bool batch_statistics;

    // Number of windows, with those that odd ends cut off.
    __host__ __device__ int64_t windows() const { return batch * ((height + 1) / 2) * ((width + 1) / 2); }
};

// Share of a thread: V channels from `channel` on, of every `step`th pixel or window from `first` on.
struct Thread {
    int64_t channel;
    int64_t first;
    int64_t step;
    int local;  // its first channel within the tile
    bool active;
};

template <int V>
__device__ Thread this_thread(const Launch& launch) {
    const int thread = static_cast<int>(threadIdx.x);
    const int slots = kThreads / launch.columns;
    Thread mine;
    mine.local = thread % launch.columns * V;
    mine.channel = static_cast<int64_t>(blockIdx.y) * launch.columns * V + mine.local;
    mine.first = static_cast<int64_t>(blockIdx.x) * slots + thread / launch.columns;
    mine.step = static_cast<int64_t>(gridDim.x) * slots;
    mine.active = mine.channel < launch.channels;
    return mine;
}

// --- elements ------------------------------------------------------------------------------------------------------

template <typename Type, int V>
__device__ void load(const void* base, int64_t at, float (&value)[V]) {
    using Storage = typename Type::Storage;
    const Storage* x = static_cast<const Storage*>(base) + at;
    if constexpr (V == 1) {
        value[0] = Type::value(*x);
    } else {
        static_assert(V * sizeof(Storage) == sizeof(uint4));
        const uint4 raw = __ldg(reinterpret_cast<const uint4*>(x));
        Storage parts[V];
        memcpy(parts, &raw, sizeof(raw));
#pragma unroll
        for (int k = 0; k < V; ++k) value[k] = Type::value(parts[k]);
    }
}

template <typename Type, int V>
__device__ void store(void* base, int64_t at, const float (&value)[V]) {
    using Storage = typename Type::Storage;
    Storage* x = static_cast<Storage*>(base) + at;
    Storage parts[V];
#pragma unroll
    for (int k = 0; k < V; ++k) parts[k] = Type::storage(value[k]);
    if constexpr (V == 1) {
        *x = parts[0];
    } else {
        uint4 raw;
        memcpy(&raw, parts, sizeof(raw));
        *reinterpret_cast<uint4*>(x) = raw;
    }
}

template <int V>
struct alignas(V) Bytes {
    uint8_t byte[V];
};

// Per-channel floats of this thread, from shared memory.
template <int V>
__device__ void read(const float* shared, const Thread& mine, float (&value)[V]) {
#pragma unroll
    for (int k = 0; k < V; ++k) value[k] = shared[mine.local + k];
}

// A 2x2 window.
struct Window {
    int64_t corner;  // pixel of its first place
    int64_t pooled;  // output pixel, of a whole window
    bool right;      // whether it has a right column
    bool below;      // whether it has a lower row
};

__device__ Window window_of(const Launch& launch, int64_t index) {
    // Division of 32 bits is several times as fast; the launcher has checked that they suffice.
    const auto across = static_cast<uint32_t>((launch.width + 1) / 2);
    const auto down = static_cast<uint32_t>((launch.height + 1) / 2);
    const uint32_t row = static_cast<uint32_t>(index) / across;
    const int64_t j = static_cast<uint32_t>(index) % across;
    const int64_t i = row % down;
    const int64_t n = row / down;
    return Window{(n * launch.height + 2 * i) * launch.width + 2 * j,
                  (n * (launch.height / 2) + i) * (launch.width / 2) + j, 2 * j + 1 < launch.width,
                  2 * i + 1 < launch.height};
}

// Whether a window has place 0 to 3, and the distance of that place from the corner, in pixels.
__device__ bool has_place(const Window& window, int place) {
    return (place % 2 == 0 || window.right) && (place < 2 || window.below);
}
__device__ int64_t offset_of(const Launch& launch, int place) {
    return place % 2 + (place < 2 ? 0 : launch.width);
}

// --- sums in a fixed order -----------------------------------------------------------------------------------------

// Adds the two sums of each channel over the block and writes them as this block's row. All threads take part.
template <int V>
__device__ void write_partials(const Launch& launch, double (&sums)[2 * V]) {
    __shared__ double warps[kWarps][2 * kMaxChannels];
    const int thread = static_cast<int>(threadIdx.x);
    const int lane = thread % 32;
#pragma unroll
    for (int i = 0; i < 2 * V; ++i) {
        // Lanes of one column are `columns` apart.
        for (int offset = 16; offset >= launch.columns; offset /= 2) {
            sums[i] += __shfl_down_sync(0xffffffffu, sums[i], offset);
        }
        if (lane < launch.columns) warps[thread / 32][lane * 2 * V + i] = sums[i];
    }
    __syncthreads();
    const int entries = launch.columns * V * 2;
    if (thread < entries) {
        double total = 0;
        for (int w = 0; w < kWarps; ++w) total += warps[w][thread];
        launch.partials[(static_cast<int64_t>(blockIdx.x) * launch.tiles + blockIdx.y) * entries + thread] = total;
    }
}

// Adds all rows of this block's tile: totals [X * V, 2]. All threads take part.
template <int V>
__device__ void add_partials(const Launch& launch, double (&totals)[2 * kMaxChannels]) {
    __shared__ double parts[kThreads];
    const int thread = static_cast<int>(threadIdx.x);
    const int entries = launch.columns * V * 2;  // a power of two up to 128, so it divides the threads
    const int shares = kThreads / entries;
    double part = 0;
    for (int64_t row = thread / entries; row < launch.rows; row += shares) {
        part += launch.partials[(row * launch.tiles + blockIdx.y) * entries + thread % entries];
    }
    parts[thread] = part;
    __syncthreads();
    if (thread < entries) {
        double total = 0;
        for (int share = 0; share < shares; ++share) total += parts[share * entries + thread];
        totals[thread] = total;
    }
    __syncthreads();
}

}  // namespace esper::norm_relu_pool
