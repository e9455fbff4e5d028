// Fused AdamW on CUDA.
//
// Policy: two launches for up to kLargeCapacity tensors, of any number of groups. The first one counts the steps. Many
// blocks read the count of one tensor, in no order, so that none of them could raise it without a race; between two
// launches in one stream all blocks of the first are done. The second one steps: a block takes one chunk of 8192
// elements of one tensor, and reads learning rate, coefficient, count, loss scale and found_inf from device memory. The
// table of pointers travels by value among the arguments of both. More tensors take more launches, two a table.
#include <torch/csrc/stable/library.h>

#include "../adamw_arguments.h"
#include "elements.cuh"
#include "optimizer_table.cuh"
#include "stream.h"

namespace esper::adamw {
namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;           // elements of each kind in flight per thread
constexpr int kSmallCapacity = 40;   // fits the 4 KB of arguments that every launch has
constexpr int kLargeCapacity = 352;  // fits the 32 KB of CUDA 12.1 and later

template <int Capacity>
using Table = optimizer::Table<Tensor, Capacity>;

// Arguments that all tensors share.
struct Launch {
    optimizer::Scaler scaler;
    Settings settings;
};
static_assert(sizeof(Table<kSmallCapacity>) + sizeof(Launch) <= 4096);
static_assert(sizeof(Table<kLargeCapacity>) + sizeof(Launch) <= 32764);

// Counts the steps of all tensors that are to be stepped; one block.
template <int Capacity>
__global__ void __launch_bounds__(kThreads)
    count_kernel(const __grid_constant__ Table<Capacity> table, const __grid_constant__ Launch launch) {
    for (int n = static_cast<int>(threadIdx.x); n < table.count; n += kThreads) {
        if (gradient_scale(table.coefficient_of(n), launch.scaler) != 0) *table.tensor[n].step += 1;
    }
}

// Steps elements `start` to `end`.
template <typename Type, typename T>
__device__ void step_elements(const Tensor& tensor, int64_t start, int64_t end, const Factors<T>& factors) {
    using Storage = typename Type::Storage;
    auto* __restrict__ p = static_cast<Storage*>(tensor.parameter);
    const auto* __restrict__ g = static_cast<const Storage*>(tensor.gradient);
    auto* __restrict__ m = static_cast<Storage*>(tensor.mean);
    auto* __restrict__ v = static_cast<Storage*>(tensor.square);
#pragma unroll kUnroll
    for (int64_t i = start + threadIdx.x; i < end; i += kThreads) {
        T parameter = Type::value(p[i]);
        T mean = Type::value(m[i]);
        T square = Type::value(v[i]);
        step(parameter, static_cast<T>(Type::value(g[i])), mean, square, factors);
        p[i] = Type::storage(parameter);
        m[i] = Type::storage(mean);
        v[i] = Type::storage(square);
    }
}

// Steps all tensors, whose steps are counted already.
template <int Capacity>
__global__ void __launch_bounds__(kThreads)
    adamw_kernel(const __grid_constant__ Table<Capacity> table, const __grid_constant__ Launch launch) {
    const int chunk = static_cast<int>(blockIdx.x);
    const int n = tensor_of_chunk(table.first_chunk, table.count, chunk);
    const Tensor tensor = table.tensor[n];
    const double scale = gradient_scale(table.coefficient_of(n), launch.scaler);
    if (scale == 0) return;
    __shared__ Factors<double> factors;  // of one thread for all: powers in double are slow
    if (threadIdx.x == 0) {
        factors = factors_of(read(table.lr_of(n), 0), table.weight_decay[n], scale, *tensor.step, launch.settings);
    }
    __syncthreads();
    const int64_t start = (chunk - table.first_chunk[n]) * kChunk;
    const int64_t end = min(start + kChunk, tensor.elements);
    if (tensor.dtype == Dtype::kFloat64) {
        const Factors<double> own = factors;
        step_elements<Float64>(tensor, start, end, own);
        return;
    }
    const auto own = rounded<float>(factors);
    if (tensor.dtype == Dtype::kFloat32) {
        step_elements<Float32>(tensor, start, end, own);
    } else {
        step_elements<BFloat16>(tensor, start, end, own);
    }
}

template <int Capacity>
void launch_all(const Arguments& arguments, cudaStream_t stream) {
    const Launch launch{arguments.scaler, arguments.settings};
    for (size_t first = 0; first < arguments.tensors.size(); first += Capacity) {
        const auto table = optimizer::table_of<Capacity>(arguments, arguments.tensors, first);
        count_kernel<Capacity><<<1, kThreads, 0, stream>>>(table, launch);
        STD_CUDA_KERNEL_LAUNCH_CHECK();
        if (table.chunks == 0) continue;  // nothing but empty tensors
        adamw_kernel<Capacity><<<static_cast<unsigned int>(table.chunks), kThreads, 0, stream>>>(table, launch);
        STD_CUDA_KERNEL_LAUNCH_CHECK();
    }
}

void adamw_step(StableIValue* stack, uint64_t, uint64_t) {
    const Arguments arguments = read_arguments(stack);
    if (arguments.tensors.empty()) return;
    const DeviceStream stream(arguments.device);
    if (arguments.tensors.size() <= static_cast<size_t>(kSmallCapacity)) {
        launch_all<kSmallCapacity>(arguments, stream);
    } else {
        launch_all<kLargeCapacity>(arguments, stream);
    }
}

}  // namespace
}  // namespace esper::adamw

STABLE_TORCH_LIBRARY_IMPL(esper, CUDA, m) {
    m.impl("adamw_step_", &esper::adamw::adamw_step);
}
