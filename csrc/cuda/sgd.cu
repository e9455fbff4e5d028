// Fused SGD on CUDA.
//
// Policy: one launch for up to kLargeCapacity tensors, of any number of groups. The table of pointers travels by
// value among the kernel's arguments, so there is nothing to upload and a captured graph holds its own copy. A block
// steps one chunk of 8192 elements of one tensor; learning rate, coefficient, loss scale and found_inf are read from
// device memory by every block. More tensors take more launches, one table each.
#include <torch/csrc/stable/library.h>

#include "../sgd_arguments.h"
#include "elements.cuh"
#include "optimizer_table.cuh"
#include "stream.h"

namespace esper::sgd {
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
    double momentum;
    bool nesterov;
};
static_assert(sizeof(Table<kSmallCapacity>) + sizeof(Launch) <= 4096);
static_assert(sizeof(Table<kLargeCapacity>) + sizeof(Launch) <= 32764);

// Steps elements `start` to `end`.
template <typename Type, typename T>
__device__ void step_elements(const Tensor& tensor, int64_t start, int64_t end, const Factors<T>& factors) {
    using Storage = typename Type::Storage;
    auto* __restrict__ p = static_cast<Storage*>(tensor.parameter);
    const auto* __restrict__ g = static_cast<const Storage*>(tensor.gradient);
    auto* __restrict__ m = static_cast<Storage*>(tensor.buffer);
#pragma unroll kUnroll
    for (int64_t i = start + threadIdx.x; i < end; i += kThreads) {
        T parameter = Type::value(p[i]);
        const T gradient = Type::value(g[i]);
        if (m == nullptr) {
            step(parameter, gradient, factors);
        } else {
            T buffer = Type::value(m[i]);
            step(parameter, gradient, buffer, factors);
            m[i] = Type::storage(buffer);
        }
        p[i] = Type::storage(parameter);
    }
}

template <int Capacity>
__global__ void __launch_bounds__(kThreads)
    sgd_kernel(const __grid_constant__ Table<Capacity> table, const __grid_constant__ Launch launch) {
    const int chunk = static_cast<int>(blockIdx.x);
    const int n = tensor_of_chunk(table.first_chunk, table.count, chunk);
    const Tensor tensor = table.tensor[n];
    const double scale = gradient_scale(table.coefficient_of(n), launch.scaler);
    if (scale == 0) return;
    const double lr = read(table.lr_of(n), 0);
    const int64_t start = (chunk - table.first_chunk[n]) * kChunk;
    const int64_t end = min(start + kChunk, tensor.elements);
    if (tensor.dtype == Dtype::kFloat64) {
        const Factors<double> factors{lr, scale, table.weight_decay[n], launch.momentum, launch.nesterov};
        step_elements<Float64>(tensor, start, end, factors);
        return;
    }
    const Factors<float> factors{static_cast<float>(lr), static_cast<float>(scale),
                                 static_cast<float>(table.weight_decay[n]), static_cast<float>(launch.momentum),
                                 launch.nesterov};
    if (tensor.dtype == Dtype::kFloat32) {
        step_elements<Float32>(tensor, start, end, factors);
    } else {
        step_elements<BFloat16>(tensor, start, end, factors);
    }
}

template <int Capacity>
void launch_all(const Arguments& arguments, cudaStream_t stream) {
    const Launch launch{arguments.scaler, arguments.momentum, arguments.nesterov};
    for (size_t first = 0; first < arguments.tensors.size(); first += Capacity) {
        const auto table = optimizer::table_of<Capacity>(arguments, arguments.tensors, first);
        sgd_kernel<Capacity><<<static_cast<unsigned int>(table.chunks), kThreads, 0, stream>>>(table, launch);
        STD_CUDA_KERNEL_LAUNCH_CHECK();
    }
}

void sgd_step(StableIValue* stack, uint64_t, uint64_t) {
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
}  // namespace esper::sgd

STABLE_TORCH_LIBRARY_IMPL(esper, CUDA, m) {
    m.impl("sgd_step_", &esper::sgd::sgd_step);
}
