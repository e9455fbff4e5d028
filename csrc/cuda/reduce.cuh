// Reductions in a fixed order: over the lanes of a warp, over a block, and in the last block of a launch.
//
// T is a struct of doubles with a function add(T& into, const T& other).
#pragma once

#include <cuda_runtime.h>

namespace esper {

// Applies `read` to each double of a struct of doubles.
template <typename T, typename Read>
__device__ inline T for_doubles(const T& from, const Read& read) {
    static_assert(sizeof(T) % sizeof(double) == 0);
    T into;
    const double* source = reinterpret_cast<const double*>(&from);
    double* target = reinterpret_cast<double*>(&into);
#pragma unroll
    for (size_t i = 0; i < sizeof(T) / sizeof(double); ++i) target[i] = read(source[i]);
    return into;
}

// The value of lane + offset.
template <typename T>
__device__ inline T shfl_down(const T& mine, int offset) {
    return for_doubles(mine, [offset](const double& x) { return __shfl_down_sync(0xffffffffu, x, offset); });
}

// The sum over a warp; complete in lane 0 only.
template <typename T>
__device__ inline T warp_sum(T mine) {
    for (int offset = 16; offset > 0; offset /= 2) add(mine, shfl_down(mine, offset));
    return mine;
}

// The sum over a block of kThreads; complete in thread 0 only.
template <int kThreads, typename T>
__device__ inline T block_sum(const T& mine) {
    __shared__ T warps[kThreads / 32];
    T sum = warp_sum(mine);
    __syncthreads();  // an earlier sum has been read
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < kThreads / 32; ++w) add(sum, warps[w]);
    }
    return sum;
}

// A value that another block may have written: read past this multiprocessor's own cache.
template <typename T>
__device__ inline T fresh(const T* value) {
    return for_doubles(*value, [](const double& x) { return __ldcg(&x); });
}

// True in exactly one block, the last to call it. That block then sees what the first threads of all blocks wrote
// before, and after a __syncthreads() also what their other threads wrote; it reads that with fresh(). `counter` is
// zero before the launch and after it, so a graph can be replayed.
__device__ inline bool is_last_block(unsigned int* counter) {
    __shared__ bool last;
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(counter, 1u) == gridDim.x - 1;
        if (last) *counter = 0;
        __threadfence();
    }
    __syncthreads();
    return last;
}

}  // namespace esper
