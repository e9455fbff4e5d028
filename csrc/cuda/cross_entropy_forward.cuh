// Rows of logits to losses on CUDA: the forward half of cross_entropy.cu, which alone includes this and states the
// policy of both.
#pragma once

#include "../cross_entropy.h"
#include "elements.cuh"
#include "reduce.cuh"

namespace esper::cross_entropy {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kUnroll = 4;  // logits a thread has in flight

// Arguments of a launch. Outputs of forward that are null are not written.
struct Launch : Rows {
    uint8_t* correct;       // [N]
    void* normaliser;       // [N, 2]
    void* loss;             // []
    double* stats;          // [kFieldCount], written
    double* row;            // [kFieldCount], added to
    int16_t* counts;        // [B] from `correct`, B sequences of T
    unsigned int* counter;  // zero; unused by a single block
    Totals* partials;       // [blocks], likewise
    // Backward only; it reads `normaliser` and `stats` of forward.
    const void* grad_loss;  // []
    void* gradient;         // [N, C]
};

// --- reducing -------------------------------------------------------------------------------------------------------

template <typename Real>
__device__ RowSums<Real> row_shfl_down(const RowSums<Real>& mine, int offset) {
    constexpr unsigned int kAll = 0xffffffffu;
    return RowSums<Real>{__shfl_down_sync(kAll, mine.max, offset), __shfl_down_sync(kAll, mine.sum, offset),
                         __shfl_down_sync(kAll, mine.total, offset),
                         __shfl_down_sync(kAll, static_cast<int>(mine.beaten), offset) != 0};
}

// Joins the parts of one row that kPerRow threads hold; complete in the first of them.
template <int kPerRow, typename Real>
__device__ RowSums<Real> join_row(RowSums<Real> mine) {
    if constexpr (kPerRow >= 32) {
        for (int offset = 16; offset > 0; offset /= 2) merge(mine, row_shfl_down(mine, offset));
    }
    if constexpr (kPerRow == kThreads) {
        __shared__ RowSums<Real> warps[kWarps];
        __syncthreads();  // the row before has been read
        if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = mine;
        __syncthreads();
        if (threadIdx.x == 0) {
            for (int w = 1; w < kWarps; ++w) merge(mine, warps[w]);
        }
    }
    return mine;
}

// --- forward --------------------------------------------------------------------------------------------------------

// This thread's part of a row: every kPerRow-th logit from `lane` on.
template <typename Type, int kPerRow>
__device__ RowSums<typename Type::Real> part_of_row(const typename Type::Storage* logits, int64_t classes, int lane,
                                                    int64_t target, typename Type::Real target_logit, bool smooth) {
    RowSums<typename Type::Real> part = empty_row<typename Type::Real>();
    for (int64_t start = lane; start < classes; start += kUnroll * kPerRow) {
        typename Type::Storage x[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            const int64_t c = start + u * kPerRow;
            if (c < classes) x[u] = logits[c];
        }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            const int64_t c = start + u * kPerRow;
            if (c < classes) add_logit(part, Type::value(x[u]), target_logit, c < target, smooth);
        }
    }
    return part;
}

// Computes one row. Its first thread writes the outputs and adds the row to `totals`.
template <typename Type, int kPerRow>
__device__ void forward_row(const Launch& launch, int64_t row, int lane, Totals& totals) {
    using Real = typename Type::Real;
    const auto* logits = static_cast<const typename Type::Storage*>(launch.logits) + row * launch.classes;
    const int64_t given = launch.targets[row];
    const bool counted = given != launch.ignore_index;
    const bool is_class = given >= 0 && given < launch.classes;
    const int64_t target = is_class ? given : 0;
    const Real target_logit = Type::value(logits[target]);
    const RowSums<Real> sums = join_row<kPerRow>(
        part_of_row<Type, kPerRow>(logits, launch.classes, lane, target, target_logit, launch.smoothing != 0));
    if (lane != 0) return;
    const Real log_sum_of = log_sum(sums);
    const bool right = is_class && !sums.beaten;
    if (launch.correct != nullptr) launch.correct[row] = counted && right;
    if (launch.normaliser != nullptr) {
        static_cast<Real*>(launch.normaliser)[2 * row] = sums.max;
        static_cast<Real*>(launch.normaliser)[2 * row + 1] = log_sum_of;
    }
    if (!counted) return;
    const Real loss = row_loss(sums, log_sum_of, target_logit, launch.classes, launch.smoothing);
    add_row(totals, is_class ? static_cast<double>(loss) : static_cast<double>(NAN), right);
}

// Writes the results of all rows; one thread.
template <typename Real>
__device__ void write_results(const Launch& launch, const Totals& totals) {
    if (launch.loss != nullptr) *static_cast<Real*>(launch.loss) = static_cast<Real>(mean_loss(totals));
    if (launch.stats != nullptr) {
        for (int field = 0; field < kFieldCount; ++field) launch.stats[field] = 0;
        accumulate(totals, launch.stats);
    }
    if (launch.row != nullptr) accumulate(totals, launch.row);
}

// Counts the correct tokens of each sequence, a warp a sequence.
__device__ void count_sequences(const Launch& launch) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    for (int64_t b = threadIdx.x / 32; b < launch.samples; b += kWarps) {
        int count = 0;
        for (int64_t t = lane; t < launch.sequence; t += 32) count += __ldcg(launch.correct + b * launch.sequence + t);
        for (int offset = 16; offset > 0; offset /= 2) count += __shfl_down_sync(0xffffffffu, count, offset);
        if (lane == 0) launch.counts[b] = static_cast<int16_t>(count);
    }
}

template <typename Type, int kPerRow>
__global__ void __launch_bounds__(kThreads) forward_kernel(const Launch launch) {
    constexpr int kRows = kThreads / kPerRow;  // rows of a block at a time
    const int lane = static_cast<int>(threadIdx.x) % kPerRow;
    Totals mine{0, 0, 0, 0};
    // All threads of a row leave this loop together, so they may wait for each other in it.
    for (int64_t row = static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.x / kPerRow; row < launch.rows;
         row += static_cast<int64_t>(gridDim.x) * kRows) {
        forward_row<Type, kPerRow>(launch, row, lane, mine);
    }
    Totals total = block_sum<kThreads>(mine);
    if (gridDim.x > 1) {
        if (threadIdx.x == 0) launch.partials[blockIdx.x] = total;
        __syncthreads();  // what all threads wrote of their rows comes before the count
        if (!is_last_block(launch.counter)) return;
        Totals sum{0, 0, 0, 0};
        for (int p = static_cast<int>(threadIdx.x); p < static_cast<int>(gridDim.x); p += kThreads) {
            add(sum, fresh(launch.partials + p));
        }
        total = block_sum<kThreads>(sum);
    }
    if (threadIdx.x == 0) write_results<typename Type::Real>(launch, total);
    if (launch.counts != nullptr) {
        __syncthreads();
        count_sequences(launch);
    }
}

}  // namespace
}  // namespace esper::cross_entropy
