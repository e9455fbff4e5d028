// Normalisation, ReLU and 2x2 max-pool on CUDA, forward and backward.
//
// Policy: two launches each way. The first sums over pixels and writes one row of partial sums a block; every block of
// the second adds the rows of its channels again, always in the same order, which costs less than to let blocks wait
// for each other, and needs no counter and no atomic. Threads lie over columns of V channels (16 bytes where the
// channels allow it, else one) and over pixels; a block works on one tile of columns. Sums are float32 in a thread and
// float64 from there on. Backward goes by windows with and without the pool, with the same threads in the same order,
// so that a pool outside gives the same bits as the one inside.
#include <cuda_runtime.h>
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <limits>
#include <tuple>

#include "../norm_relu_pool_arguments.h"
#include "norm_relu_pool_backward.cuh"
#include "norm_relu_pool_forward.cuh"
#include "stream.h"

namespace esper::norm_relu_pool {
namespace {

// --- launchers -----------------------------------------------------------------------------------------------------

bool is_aligned(const void* data, size_t bytes) {
    return reinterpret_cast<uintptr_t>(data) % bytes == 0;
}

int64_t blocks_for(int64_t count, int64_t per_block, int64_t most) {
    return std::clamp<int64_t>((count + per_block - 1) / per_block, 1, std::max<int64_t>(1, most));
}

// Cuts the channels into tiles for columns of V channels.
template <int V>
void set_tiles(Launch& launch) {
    const int64_t columns = (launch.channels + V - 1) / V;
    const int most = V == 1 ? 32 : kMaxChannels / V;
    launch.columns = 1;
    while (launch.columns < most && launch.columns < columns) launch.columns *= 2;
    launch.tiles = static_cast<int>((columns + launch.columns - 1) / launch.columns);
}

// Allocates rows of partial sums over `count` pixels or windows, of which each thread should have `per_thread`.
template <int V>
OwnedTensor make_partials(Launch& launch, int64_t count, int64_t per_thread, const Device& device) {
    launch.rows =
        static_cast<int>(blocks_for(count, kThreads / launch.columns * per_thread, kSumBlocks / launch.tiles));
    OwnedTensor partials = empty_float64(device, {launch.rows, launch.tiles * launch.columns * V * 2});
    launch.partials = static_cast<double*>(mutable_data(partials.get()));
    return partials;
}

dim3 sum_grid(const Launch& launch) {
    return dim3(static_cast<unsigned int>(launch.rows), static_cast<unsigned int>(launch.tiles));
}

dim3 apply_grid(const Launch& launch, int64_t count) {
    const int64_t blocks = blocks_for(count, kThreads / launch.columns, kApplyBlocks / launch.tiles);
    return dim3(static_cast<unsigned int>(blocks), static_cast<unsigned int>(launch.tiles));
}

template <typename Type, int V>
void launch_forward(Launch launch, bool pool, const Device& device, cudaStream_t stream) {
    set_tiles<V>(launch);
    OwnedTensor partials;
    if (launch.batch_statistics) {
        partials = make_partials<V>(launch, launch.pixels(), kUnroll, device);
        moments_kernel<Type, V><<<sum_grid(launch), kThreads, 0, stream>>>(launch);
        STD_CUDA_KERNEL_LAUNCH_CHECK();
    }
    const dim3 grid = apply_grid(launch, pool ? launch.windows() : launch.pixels());
    if (pool) {
        normalise_kernel<Type, V, true><<<grid, kThreads, 0, stream>>>(launch);
    } else {
        normalise_kernel<Type, V, false><<<grid, kThreads, 0, stream>>>(launch);
    }
    STD_CUDA_KERNEL_LAUNCH_CHECK();
}

template <typename Type, int V, bool kPool>
void launch_backward(Launch launch, const Device& device, cudaStream_t stream) {
    set_tiles<V>(launch);
    const OwnedTensor partials = make_partials<V>(launch, launch.windows(), 1, device);
    sums_kernel<Type, V, kPool><<<sum_grid(launch), kThreads, 0, stream>>>(launch);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
    const dim3 grid = apply_grid(launch, kPool ? launch.windows() : launch.pixels());
    if (launch.batch_statistics) {
        gradient_kernel<Type, V, kPool, true><<<grid, kThreads, 0, stream>>>(launch);
    } else {
        gradient_kernel<Type, V, kPool, false><<<grid, kThreads, 0, stream>>>(launch);
    }
    STD_CUDA_KERNEL_LAUNCH_CHECK();
}

// Calls `body` with the storage type and the number of channels that one load takes.
template <typename Body>
void for_type(ScalarType dtype, const Launch& launch, const Body& body) {
    const int vector = dtype == ScalarType::Float ? 4 : 8;
    const bool wide = launch.channels % vector == 0 && is_aligned(launch.input, 16) &&
                      is_aligned(launch.gradient, 16) && is_aligned(launch.result, 16) && is_aligned(launch.choice, 8);
    if (dtype == ScalarType::Float) {
        if (wide) return body(Float32{}, std::integral_constant<int, 4>{});
        return body(Float32{}, std::integral_constant<int, 1>{});
    }
    if (wide) return body(BFloat16{}, std::integral_constant<int, 8>{});
    return body(BFloat16{}, std::integral_constant<int, 1>{});
}

Launch make_launch(const Tensor& input, const Shape& shape, const Tensor& result, const Tensor& choice) {
    check(shape.pixels() < std::numeric_limits<int32_t>::max(), "norm_relu_pool: too many pixels");
    Launch launch{};
    launch.input = input.const_data_ptr();
    launch.result = result.mutable_data_ptr();
    launch.choice = static_cast<uint8_t*>(const_cast<void*>(choice.const_data_ptr()));  // backward only reads it
    static_cast<Shape&>(launch) = shape;
    return launch;
}

// --- operators -----------------------------------------------------------------------------------------------------

std::tuple<Tensor, Tensor, Tensor> forward(const Tensor& input, const Tensor& weight, const Tensor& bias,
                                           std::optional<Tensor> running_mean, std::optional<Tensor> running_var,
                                           double eps, bool pool) {
    const Shape shape = checked_input(input, pool);
    const Parameters parameters = checked_parameters(input, shape, weight, bias, running_mean, running_var, eps);
    const Device device = device_of(input);
    const DeviceStream stream(device);
    Outputs outputs = make_outputs(input, shape);
    Launch launch = make_launch(input, shape, outputs.output, outputs.choice);
    static_cast<Parameters&>(launch) = parameters;
    launch.statistics = static_cast<float*>(outputs.statistics.mutable_data_ptr());
    launch.batch_statistics = parameters.running_mean == nullptr;
    if (shape.channels > 0) {
        for_type(input.scalar_type(), launch, [&](auto type, auto vector) {
            launch_forward<decltype(type), decltype(vector)::value>(launch, pool, device, stream);
        });
    }
    return {outputs.output, outputs.statistics, outputs.choice};
}

std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& grad_output, const Tensor& input, const Tensor& weight,
                                            const Tensor& bias, const Tensor& statistics, const Tensor& choice,
                                            bool batch_statistics, bool pool) {
    const Shape shape = checked_input(input, pool);
    check_backward(grad_output, input, shape, statistics, choice);
    const Device device = device_of(input);
    const DeviceStream stream(device);
    Gradients gradients = make_gradients(input, shape);
    Launch launch = make_launch(input, shape, gradients.input, choice);
    launch.gradient = grad_output.const_data_ptr();
    launch.weight = checked_channels(weight, "weight", shape, device);
    launch.bias = checked_channels(bias, "bias", shape, device);
    launch.statistics = static_cast<float*>(const_cast<void*>(statistics.const_data_ptr()));  // only read
    launch.grad_weight = static_cast<float*>(gradients.weight.mutable_data_ptr());
    launch.grad_bias = static_cast<float*>(gradients.bias.mutable_data_ptr());
    launch.batch_statistics = batch_statistics;
    if (shape.channels > 0) {
        for_type(input.scalar_type(), launch, [&](auto type, auto vector) {
            using Type = decltype(type);
            constexpr int V = decltype(vector)::value;
            if (pool) {
                launch_backward<Type, V, true>(launch, device, stream);
            } else {
                launch_backward<Type, V, false>(launch, device, stream);
            }
        });
    }
    return {gradients.input, gradients.weight, gradients.bias};
}

// One block: every thread reads the count before one of them writes it.
__global__ void __launch_bounds__(kThreads) update_kernel(const Running running) {
    const int64_t count = *running.count + 1;
    __syncthreads();
    if (threadIdx.x == 0) *running.count = count;
    for (int64_t c = threadIdx.x; c < running.channels; c += kThreads) update_channel(running, c, count);
}

void update(Tensor running_mean, Tensor running_var, Tensor num_batches_tracked, const Tensor& statistics,
            std::optional<double> momentum) {
    const Running running = checked_running(running_mean, running_var, num_batches_tracked, statistics, momentum);
    const DeviceStream stream(device_of(running_mean));
    update_kernel<<<1, kThreads, 0, stream>>>(running);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace
}  // namespace esper::norm_relu_pool

STABLE_TORCH_LIBRARY_IMPL(esper, CUDA, m) {
    m.impl("norm_relu_pool", TORCH_BOX(&esper::norm_relu_pool::forward));
    m.impl("norm_relu_pool_forward", TORCH_BOX(&esper::norm_relu_pool::forward));
    m.impl("norm_relu_pool_backward", TORCH_BOX(&esper::norm_relu_pool::backward));
    m.impl("norm_relu_pool_update_", TORCH_BOX(&esper::norm_relu_pool::update));
}
