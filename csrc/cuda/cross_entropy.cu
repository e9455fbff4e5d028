// Cross-entropy on CUDA.
//
// Policy: one launch forward, one backward. Forward, a group of threads takes a row: one thread for few classes, a warp
// for some, a block for many. Each looks once at every kth logit with the arithmetic of cross_entropy.h, and parts are
// joined in a fixed order. Blocks leave a row of partial sums in scratch memory; the one that finishes last adds them
// in a fixed order and writes loss and statistics, so results are the same bits every time. A problem that fits one
// block needs no scratch memory. Scratch memory comes from torch's allocator, which is safe in a graph capture. A
// target that is no class cannot be reported from here without a sync: its loss and gradient are NaN.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>

#include <algorithm>
#include <tuple>

#include "../cross_entropy_arguments.h"
#include "elements.cuh"
#include "reduce.cuh"
#include "stream.h"

namespace esper::cross_entropy {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kUnroll = 4;                 // logits a thread has in flight
constexpr int64_t kOneThread = 64;         // most classes for a thread a row,
constexpr int64_t kOneWarp = 4096;         // and for a warp a row
constexpr int64_t kOneBlockLogits = 8192;  // most logits that one block takes alone
constexpr int64_t kMaxBlocks = 1024;       // blocks forward, and rows of partial sums
constexpr int64_t kMaxBackwardBlocks = 65536;
constexpr int64_t kChunk = 2048;  // columns of a row that a block takes backward

// The storage types of elements.cuh with the type computed in, and the way back.
struct Float32Logit : Float32 {
    using Real = float;
    static __device__ float rounded(float x) { return x; }
};
struct BFloat16Logit : BFloat16 {
    using Real = float;
    static __device__ uint16_t rounded(float x) { return __bfloat16_as_ushort(__float2bfloat16_rn(x)); }
};
struct Float16Logit : Float16 {
    using Real = float;
    static __device__ uint16_t rounded(float x) { return __half_as_ushort(__float2half_rn(x)); }
};
struct Float64Logit : Float64 {
    using Real = double;
    static __device__ double value(double x) { return x; }
    static __device__ double rounded(double x) { return x; }
};

// What a forward launch reads and writes; a null output is not wanted.
struct Launch {
    const void* logits;      // [N, C]
    const int64_t* targets;  // [N]
    int64_t rows;            // N
    int64_t classes;         // C
    int64_t ignore_index;
    double smoothing;
    uint8_t* correct;       // [N]
    void* normaliser;       // [N, 2]
    void* loss;             // []
    double* stats;          // [kFieldCount], written
    double* row;            // [kFieldCount], added to
    int16_t* counts;        // [B] from `correct`, B sequences of T
    int64_t samples;        // B
    int64_t sequence;       // T
    unsigned int* counter;  // zero; unused by a single block
    Totals* partials;       // [blocks], likewise
};

// --- reducing -------------------------------------------------------------------------------------------------------

template <typename Real>
__device__ RowSums<Real> row_from_lane_below(const RowSums<Real>& mine, int offset) {
    constexpr unsigned int kAll = 0xffffffffu;
    return RowSums<Real>{__shfl_down_sync(kAll, mine.max, offset), __shfl_down_sync(kAll, mine.sum, offset),
                         __shfl_down_sync(kAll, mine.total, offset),
                         __shfl_down_sync(kAll, static_cast<int>(mine.beaten), offset) != 0};
}

// Joins the parts that kPerRow threads hold of one row; complete in the first of them.
template <int kPerRow, typename Real>
__device__ RowSums<Real> join_row(RowSums<Real> mine) {
    if constexpr (kPerRow >= 32) {
        for (int offset = 16; offset > 0; offset /= 2) merge(mine, row_from_lane_below(mine, offset));
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

// The sum over all threads of the block; complete in thread 0 only.
__device__ Totals block_sum(Totals mine) {
    __shared__ Totals warps[kWarps];
    for (int offset = 16; offset > 0; offset /= 2) add(mine, from_lane_below(mine, offset));
    __syncthreads();  // an earlier sum has been read
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = mine;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < kWarps; ++w) add(mine, warps[w]);
    }
    return mine;
}

// A row of partial sums that another block may have written.
__device__ Totals fresh(const Totals* partial) {
    return Totals{__ldcg(&partial->loss), __ldcg(&partial->correct), __ldcg(&partial->count),
                  __ldcg(&partial->not_finite)};
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

// Looks at one row; complete in the first of its threads, which writes what is wanted of it and adds it to `totals`.
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

// Writes what is known once all rows are; one thread.
template <typename Real>
__device__ void finish(const Launch& launch, const Totals& totals) {
    if (launch.loss != nullptr) *static_cast<Real*>(launch.loss) = static_cast<Real>(mean_loss(totals));
    if (launch.stats != nullptr) {
        for (int field = 0; field < kFieldCount; ++field) launch.stats[field] = 0;
        accumulate(totals, launch.stats);
    }
    if (launch.row != nullptr) accumulate(totals, launch.row);
}

// Right tokens of each sequence, a warp a sequence.
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
    Totals total = block_sum(mine);
    if (gridDim.x > 1) {
        if (threadIdx.x == 0) launch.partials[blockIdx.x] = total;
        __syncthreads();  // what all threads wrote of their rows comes before the count
        if (!is_last_block(launch.counter)) return;
        Totals sum{0, 0, 0, 0};
        for (int p = static_cast<int>(threadIdx.x); p < static_cast<int>(gridDim.x); p += kThreads) {
            add(sum, fresh(launch.partials + p));
        }
        total = block_sum(sum);
    }
    if (threadIdx.x == 0) finish<typename Type::Real>(launch, total);
    if (launch.counts != nullptr) {
        __syncthreads();
        count_sequences(launch);
    }
}

// --- backward -------------------------------------------------------------------------------------------------------

struct BackwardLaunch {
    const void* logits;      // [N, C]
    const int64_t* targets;  // [N]
    const void* normaliser;  // [N, 2]
    const void* grad_loss;   // []
    const double* stats;     // [kFieldCount]
    void* gradient;          // [N, C]
    int64_t rows;
    int64_t classes;
    int64_t ignore_index;
    double smoothing;
};

template <typename Type>
__device__ void backward_element(const BackwardLaunch& launch, const GradientScale<typename Type::Real>& scale,
                                 int64_t row, int64_t column) {
    using Real = typename Type::Real;
    const int64_t target = launch.targets[row];
    const int64_t i = row * launch.classes + column;
    Real gradient = 0;
    if (target != launch.ignore_index) {
        const Real* pair = static_cast<const Real*>(launch.normaliser) + 2 * row;
        const Real x = Type::value(static_cast<const typename Type::Storage*>(launch.logits)[i]);
        const bool is_class = target >= 0 && target < launch.classes;
        gradient = is_class ? gradient_of(x, pair[0], pair[1], column == target, scale) : static_cast<Real>(NAN);
    }
    static_cast<typename Type::Storage*>(launch.gradient)[i] = Type::rounded(gradient);
}

// kWide: a block takes kChunk columns of a row at a time; else a thread takes an element, whatever its row.
template <typename Type, bool kWide>
__global__ void __launch_bounds__(kThreads) backward_kernel(const BackwardLaunch launch) {
    using Real = typename Type::Real;
    __shared__ GradientScale<Real> scale;
    if (threadIdx.x == 0) {
        scale = gradient_scale<Real>(static_cast<double>(*static_cast<const Real*>(launch.grad_loss)),
                                     launch.stats[kCount], launch.classes, launch.smoothing);
    }
    __syncthreads();
    if constexpr (kWide) {
        const int64_t chunks = (launch.classes + kChunk - 1) / kChunk;
        for (int64_t item = blockIdx.x; item < launch.rows * chunks; item += gridDim.x) {
            const int64_t row = item / chunks;
            const int64_t start = (item - row * chunks) * kChunk;
            const int64_t end = start + kChunk < launch.classes ? start + kChunk : launch.classes;
#pragma unroll kUnroll
            for (int64_t c = start + threadIdx.x; c < end; c += kThreads) {
                backward_element<Type>(launch, scale, row, c);
            }
        }
    } else {
        const int64_t elements = launch.rows * launch.classes;
        for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < elements;
             i += static_cast<int64_t>(gridDim.x) * kThreads) {
            const int64_t row = i / launch.classes;
            backward_element<Type>(launch, scale, row, i - row * launch.classes);
        }
    }
}

__global__ void accumulate_kernel(double* row, const double* stats) {  // both [kFieldCount]
    if (threadIdx.x < static_cast<unsigned int>(kFieldCount)) row[threadIdx.x] += stats[threadIdx.x];
}

// --- launchers ------------------------------------------------------------------------------------------------------

Device device_of(const Tensor& tensor) {
    return esper::device_of(tensor.get());
}

int64_t divided_up(int64_t value, int64_t by) {
    return (value + by - 1) / by;
}

int threads_per_row(int64_t classes) {
    if (classes <= kOneThread) return 1;
    return classes <= kOneWarp ? 32 : kThreads;
}

int64_t forward_blocks(const Problem& problem) {
    if (problem.rows * problem.classes <= kOneBlockLogits) return 1;
    return std::min(kMaxBlocks, divided_up(problem.rows, kThreads / threads_per_row(problem.classes)));
}

template <typename Type>
void launch_forward(const Launch& launch, unsigned int blocks, cudaStream_t stream) {
    switch (threads_per_row(launch.classes)) {
        case 1:
            forward_kernel<Type, 1><<<blocks, kThreads, 0, stream>>>(launch);
            break;
        case 32:
            forward_kernel<Type, 32><<<blocks, kThreads, 0, stream>>>(launch);
            break;
        default:
            forward_kernel<Type, kThreads><<<blocks, kThreads, 0, stream>>>(launch);
    }
    STD_CUDA_KERNEL_LAUNCH_CHECK();
}

// Fills in the problem and the scratch memory, and launches. An empty problem is launched too: it has statistics.
void forward(const Problem& problem, Launch launch) {
    const Device device = device_of(problem.held_logits);
    const torch::stable::accelerator::DeviceGuard guard(device.index);
    const cudaStream_t stream = current_stream(device);
    const int64_t blocks = forward_blocks(problem);
    launch.logits = problem.logits;
    launch.targets = problem.targets;
    launch.rows = problem.rows;
    launch.classes = problem.classes;
    launch.ignore_index = problem.ignore_index;
    launch.smoothing = problem.smoothing;
    launch.samples = problem.samples();
    launch.sequence = problem.sequence;

    // Scratch in doubles: the counter and the partial sums of many blocks, then a byte a token for `counts`.
    constexpr int64_t kColumns = sizeof(Totals) / sizeof(double);
    const int64_t head = blocks > 1 ? (1 + blocks) * kColumns : 0;
    const int64_t tokens = launch.counts != nullptr ? divided_up(problem.rows, sizeof(double)) : 0;
    OwnedTensor scratch;
    if (head + tokens > 0) {
        scratch = empty_float64(device, head + tokens);
        void* data = nullptr;
        TORCH_ERROR_CODE_CHECK(torch_get_mutable_data_ptr(scratch.get(), &data));
        if (blocks > 1) {
            launch.counter = static_cast<unsigned int*>(data);
            launch.partials = static_cast<Totals*>(data) + 1;
            STD_CUDA_CHECK(cudaMemsetAsync(launch.counter, 0, sizeof(Totals), stream));
        }
        if (launch.counts != nullptr) launch.correct = reinterpret_cast<uint8_t*>(static_cast<double*>(data) + head);
    }
    const auto grid = static_cast<unsigned int>(blocks);
    switch (problem.dtype) {
        case ScalarType::Float:
            return launch_forward<Float32Logit>(launch, grid, stream);
        case ScalarType::BFloat16:
            return launch_forward<BFloat16Logit>(launch, grid, stream);
        case ScalarType::Half:
            return launch_forward<Float16Logit>(launch, grid, stream);
        default:
            return launch_forward<Float64Logit>(launch, grid, stream);
    }
}

std::tuple<Tensor, Tensor, Tensor, Tensor> cross_entropy(const Tensor& logits, const Tensor& targets,
                                                         int64_t ignore_index, double label_smoothing) {
    const Problem problem = read_problem(logits, targets, ignore_index, label_smoothing);
    Outputs out = make_outputs(problem);
    Launch launch{};
    launch.correct = static_cast<uint8_t*>(out.correct.mutable_data_ptr());
    launch.normaliser = out.normaliser.mutable_data_ptr();
    launch.loss = out.loss.mutable_data_ptr();
    launch.stats = static_cast<double*>(out.stats.mutable_data_ptr());
    forward(problem, launch);
    return {out.loss, out.correct, out.stats, out.normaliser};
}

template <typename Type>
void launch_backward(const BackwardLaunch& launch, cudaStream_t stream) {
    if (launch.classes > kThreads) {
        const int64_t blocks = std::min(kMaxBackwardBlocks, launch.rows * divided_up(launch.classes, kChunk));
        backward_kernel<Type, true><<<static_cast<unsigned int>(blocks), kThreads, 0, stream>>>(launch);
    } else {
        const int64_t blocks = std::min(kMaxBackwardBlocks, divided_up(launch.rows * launch.classes, kThreads));
        backward_kernel<Type, false><<<static_cast<unsigned int>(blocks), kThreads, 0, stream>>>(launch);
    }
    STD_CUDA_KERNEL_LAUNCH_CHECK();
}

Tensor cross_entropy_backward(const Tensor& grad_loss, const Tensor& logits, const Tensor& targets,
                              const Tensor& normaliser, const Tensor& stats, int64_t ignore_index,
                              double label_smoothing) {
    const Problem problem = read_problem(logits, targets, ignore_index, label_smoothing);
    const Saved saved = read_saved(problem, grad_loss, normaliser, stats);
    Tensor gradient = torch::stable::empty_like(problem.held_logits);
    if (problem.rows == 0) return gradient;
    const BackwardLaunch launch{problem.logits,   problem.targets, saved.normaliser,
                                saved.grad_loss,  saved.stats,     gradient.mutable_data_ptr(),
                                problem.rows,     problem.classes, problem.ignore_index,
                                problem.smoothing};
    const Device device = device_of(problem.held_logits);
    const torch::stable::accelerator::DeviceGuard guard(device.index);
    const cudaStream_t stream = current_stream(device);
    switch (problem.dtype) {
        case ScalarType::Float:
            launch_backward<Float32Logit>(launch, stream);
            break;
        case ScalarType::BFloat16:
            launch_backward<BFloat16Logit>(launch, stream);
            break;
        case ScalarType::Half:
            launch_backward<Float16Logit>(launch, stream);
            break;
        default:
            launch_backward<Float64Logit>(launch, stream);
    }
    return gradient;
}

void cross_entropy_into(const Tensor& logits, const Tensor& targets, const Tensor& block,
                        const std::optional<Tensor>& correct, int64_t env, int64_t configuration, int64_t first,
                        int64_t ignore_index, double label_smoothing) {
    const Problem problem = read_problem(logits, targets, ignore_index, label_smoothing);
    Launch launch{};
    launch.row = block_row(block, problem.held_logits.device(), env, configuration);
    const Results results = results_row(problem, correct, block, env, configuration, first);
    launch.correct = results.correct;
    launch.counts = results.counts;
    forward(problem, launch);
}

void accumulate_(const Tensor& block, int64_t env, int64_t configuration, const Tensor& stats) {
    const double* from = stats_row(stats);
    double* row = block_row(block, stats.device(), env, configuration);
    const Device device = device_of(block);
    const torch::stable::accelerator::DeviceGuard guard(device.index);
    accumulate_kernel<<<1, 32, 0, current_stream(device)>>>(row, from);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace
}  // namespace esper::cross_entropy

STABLE_TORCH_LIBRARY_IMPL(esper, CUDA, m) {
    m.impl("cross_entropy", TORCH_BOX(&esper::cross_entropy::cross_entropy));
    m.impl("cross_entropy_forward", TORCH_BOX(&esper::cross_entropy::cross_entropy));
    m.impl("cross_entropy_backward", TORCH_BOX(&esper::cross_entropy::cross_entropy_backward));
    m.impl("cross_entropy_into", TORCH_BOX(&esper::cross_entropy::cross_entropy_into));
    m.impl("accumulate_", TORCH_BOX(&esper::cross_entropy::accumulate_));
}
