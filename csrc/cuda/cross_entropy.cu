// Cross-entropy on CUDA.
//
// Policy: one launch forward, one backward. Forward, a group of threads takes a row: one thread for few classes, a warp
// for some, a block for many. Each looks once at every kth logit with the arithmetic of cross_entropy.h, and parts are
// joined in a fixed order. Blocks leave a row of partial sums in scratch memory; the one that finishes last adds them
// in a fixed order and writes loss and statistics, so results are the same bits every time. A problem that fits one
// block needs no scratch memory. Scratch memory comes from torch's allocator, which is safe in a graph capture. A
// target that is not a class cannot be reported from here without a sync: its loss and gradient are NaN.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>

#include "../cross_entropy_arguments.h"
#include "cross_entropy_forward.cuh"
#include "stream.h"

namespace esper::cross_entropy {
namespace {

constexpr int64_t kOneThread = 64;         // max classes for a thread a row,
constexpr int64_t kOneWarp = 4096;         // and for a warp a row
constexpr int64_t kOneBlockLogits = 8192;  // max logits that one block takes alone
constexpr int64_t kMaxBlocks = 1024;       // blocks forward, and rows of partial sums
constexpr int64_t kMaxBackwardBlocks = 65536;
constexpr int64_t kChunk = 2048;  // columns of a row that a block takes backward

// --- backward -------------------------------------------------------------------------------------------------------

template <typename Type>
__device__ void backward_element(const Launch& launch, const GradientScale<typename Type::Real>& scale, int64_t row,
                                 int64_t column) {
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
    static_cast<typename Type::Storage*>(launch.gradient)[i] = Type::storage(gradient);
}

// kWide: a block takes kChunk columns of a row at a time; else a thread takes one element of any row.
template <typename Type, bool kWide>
__global__ void __launch_bounds__(kThreads) backward_kernel(const Launch launch) {
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

Launch make_launch(const Problem& problem) {
    Launch launch{};
    static_cast<Rows&>(launch) = problem;
    return launch;
}

// Calls body(Type{}) for the storage type of the logits.
template <typename Body>
void for_type(const Problem& problem, const Body& body) {
    switch (problem.dtype) {
        case ScalarType::Float:
            return body(Float32{});
        case ScalarType::BFloat16:
            return body(BFloat16{});
        case ScalarType::Half:
            return body(Float16{});
        default:
            return body(Float64{});
    }
}

// Allocates the scratch memory and launches, for an empty problem too: it has statistics.
void forward(const Problem& problem, Launch launch) {
    const Device device = device_of(problem.held_logits);
    const DeviceStream stream(device);
    const int64_t blocks = forward_blocks(problem);

    // Scratch in doubles: the counter and the partial sums of many blocks, then a byte a token for `counts`.
    constexpr int64_t kColumns = sizeof(Totals) / sizeof(double);
    const int64_t head = blocks > 1 ? (1 + blocks) * kColumns : 0;
    const int64_t tokens = launch.counts != nullptr ? divided_up(problem.rows, sizeof(double)) : 0;
    OwnedTensor scratch;
    if (head + tokens > 0) {
        scratch = empty_float64(device, {head + tokens});
        void* const data = mutable_data(scratch.get());
        if (blocks > 1) {
            launch.counter = static_cast<unsigned int*>(data);
            launch.partials = static_cast<Totals*>(data) + 1;
            STD_CUDA_CHECK(cudaMemsetAsync(launch.counter, 0, sizeof(Totals), stream));
        }
        if (launch.counts != nullptr) launch.correct = reinterpret_cast<uint8_t*>(static_cast<double*>(data) + head);
    }
    for_type(problem,
             [&](auto type) { launch_forward<decltype(type)>(launch, static_cast<unsigned int>(blocks), stream); });
}

std::tuple<Tensor, Tensor, Tensor, Tensor> cross_entropy(const Tensor& logits, const Tensor& targets,
                                                         int64_t ignore_index, double label_smoothing) {
    const Problem problem = read_problem(logits, targets, ignore_index, label_smoothing);
    Outputs out = make_outputs(problem);
    Launch launch = make_launch(problem);
    launch.correct = static_cast<uint8_t*>(out.correct.mutable_data_ptr());
    launch.normaliser = out.normaliser.mutable_data_ptr();
    launch.loss = out.loss.mutable_data_ptr();
    launch.stats = static_cast<double*>(out.stats.mutable_data_ptr());
    forward(problem, launch);
    return {out.loss, out.correct, out.stats, out.normaliser};
}

template <typename Type>
void launch_backward(const Launch& launch, cudaStream_t stream) {
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
    Launch launch = make_launch(problem);
    launch.normaliser = const_cast<void*>(saved.normaliser);  // backward only reads it and the statistics
    launch.stats = const_cast<double*>(saved.stats);
    launch.grad_loss = saved.grad_loss;
    launch.gradient = gradient.mutable_data_ptr();
    const DeviceStream stream(device_of(problem.held_logits));
    for_type(problem, [&](auto type) { launch_backward<decltype(type)>(launch, stream); });
    return gradient;
}

void cross_entropy_into(const Tensor& logits, const Tensor& targets, const Tensor& block,
                        const std::optional<Tensor>& correct, int64_t env, int64_t configuration, int64_t first,
                        int64_t ignore_index, double label_smoothing) {
    const Problem problem = read_problem(logits, targets, ignore_index, label_smoothing);
    Launch launch = make_launch(problem);
    launch.row = block_row(block, problem.held_logits.device(), env, configuration);
    const Results results = results_row(problem, correct, block, env, configuration, first);
    launch.correct = results.correct;
    launch.counts = results.counts;
    forward(problem, launch);
}

void accumulate_(const Tensor& block, int64_t env, int64_t configuration, const Tensor& stats) {
    const double* from = stats_row(stats);
    double* row = block_row(block, stats.device(), env, configuration);
    const DeviceStream stream(device_of(block));
    accumulate_kernel<<<1, 32, 0, stream>>>(row, from);
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
