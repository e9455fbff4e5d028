// Reducing in a fixed order: across the lanes of a warp, and in the last block of a launch.
#pragma once

#include <cuda_runtime.h>

namespace esper {

// The value that lane + offset holds; T is made of doubles.
template <typename T>
__device__ inline T from_lane_below(const T& mine, int offset) {
    static_assert(sizeof(T) % sizeof(double) == 0);
    T theirs;
    const double* source = reinterpret_cast<const double*>(&mine);
    double* target = reinterpret_cast<double*>(&theirs);
#pragma unroll
    for (size_t i = 0; i < sizeof(T) / sizeof(double); ++i)
        target[i] = __shfl_down_sync(0xffffffffu, source[i], offset);
    return theirs;
}

// True in exactly one block: the last to come here. What the first threads of all blocks wrote before is then visible
// to it; what other threads wrote too, if a __syncthreads() came between. Read it past the multiprocessor's own cache
// (__ldcg). `counter` is zero before the launch and after it, so a graph can be replayed.
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
