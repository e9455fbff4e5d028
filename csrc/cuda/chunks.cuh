// Many tensors in one launch: a table of them among the kernel's arguments, and a block for each chunk of elements.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace esper {

constexpr int64_t kChunk = 8192;  // elements of a block; _CHUNK in esper/ops/grad_stats.py

inline int64_t chunk_count(int64_t elements) {
    return (elements + kChunk - 1) / kChunk;
}

// Index of the tensor that a chunk belongs to, the last whose `first_chunk` is not above it, which skips empty tensors.
// first_chunk is ascending, [count].
__device__ inline int tensor_of_chunk(const int32_t* first_chunk, int count, int chunk) {
    int low = 0, high = count;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (first_chunk[middle] <= chunk) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

}  // namespace esper
