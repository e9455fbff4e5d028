// Arguments of the norm_relu_pool operators, checked once for both devices.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <optional>
#include <utility>

#include "norm_relu_pool.h"
#include "tensors.h"

namespace esper::norm_relu_pool {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline Shape checked_input(const Tensor& input, bool pool) {
    check(input.dim() == 4, "norm_relu_pool: input must be [N, C, H, W], and has ", input.dim(), " dimensions");
    const Shape shape{input.size(0), input.size(2), input.size(3), input.size(1), pool};
    const ScalarType dtype = input.scalar_type();
    check(dtype == ScalarType::Float || dtype == ScalarType::BFloat16,
          "norm_relu_pool: input must be float32 or bfloat16");
    check(input.numel() == 0 || is_channels_last(input), "norm_relu_pool: input must be contiguous in channels_last");
    check(!pool || (shape.height >= 2 && shape.width >= 2),
          "norm_relu_pool: a 2x2 pool needs an input of at least 2x2, ", "got ", shape.height, "x", shape.width);
    return shape;
}

inline const float* checked_channels(const Tensor& tensor, const char* name, const Shape& shape, Device device) {
    check(tensor.scalar_type() == ScalarType::Float && tensor.dim() == 1 && tensor.size(0) == shape.channels &&
              tensor.is_contiguous() && device_of(tensor) == device,
          "norm_relu_pool: ", name, " must be contiguous float32 [", shape.channels, "] on the input's device");
    return static_cast<const float*>(tensor.const_data_ptr());
}

inline const float* checked_statistics(const Tensor& tensor, const Shape& shape, Device device) {
    check(tensor.scalar_type() == ScalarType::Float && tensor.numel() == kStatistics * shape.channels &&
              tensor.is_contiguous() && device_of(tensor) == device,
          "norm_relu_pool: statistics must be contiguous float32 [", static_cast<int>(kStatistics), ", ",
          shape.channels, "], as forward returned it, on the device of the other arguments");
    return static_cast<const float*>(tensor.const_data_ptr());
}

inline Parameters checked_parameters(const Tensor& input, const Shape& shape, const Tensor& weight, const Tensor& bias,
                                     const std::optional<Tensor>& running_mean,
                                     const std::optional<Tensor>& running_variance, double eps) {
    const Device device = device_of(input);
    check(running_mean.has_value() == running_variance.has_value(),
          "norm_relu_pool: give both running_mean and running_var, or neither for the statistics of the batch");
    check(eps >= 0, "norm_relu_pool: eps must not be negative, got ", eps);
    Parameters parameters{};
    parameters.weight = checked_channels(weight, "weight", shape, device);
    parameters.bias = checked_channels(bias, "bias", shape, device);
    if (running_mean.has_value()) {
        parameters.running_mean = checked_channels(*running_mean, "running_mean", shape, device);
        parameters.running_variance = checked_channels(*running_variance, "running_var", shape, device);
    } else {
        check(shape.pixels() != 1, "norm_relu_pool: the statistics of a batch need more than one value per channel");
    }
    parameters.eps = eps;
    return parameters;
}

inline Tensor new_tensor(const Device& device, int32_t dtype, std::initializer_list<int64_t> sizes) {
    return Tensor(empty(device, dtype, sizes).release());
}

// Results of forward.
struct Outputs {
    Tensor output;      // [N, C, H, W], or [N, C, H / 2, W / 2] pooled; the input's dtype
    Tensor statistics;  // [kStatistics, C] float32
    Tensor choice;      // uint8 as output where pooled, else [0]
};

inline Outputs make_outputs(const Tensor& input, const Shape& shape) {
    const Device device = device_of(input);
    const int32_t byte = aoti_torch_dtype_uint8();
    const int64_t height = shape.out_height();
    const int64_t width = shape.out_width();
    return Outputs{new_tensor(device, dtype_code(input.get()), {shape.batch, shape.channels, height, width}),
                   new_tensor(device, aoti_torch_dtype_float32(), {kStatistics, shape.channels}),
                   shape.pool ? new_tensor(device, byte, {shape.batch, shape.channels, height, width})
                              : new_tensor(device, byte, {0})};
}

inline void check_backward(const Tensor& grad_output, const Tensor& input, const Shape& shape, const Tensor& statistics,
                           const Tensor& choice) {
    const Device device = device_of(input);
    const bool like_output = grad_output.dim() == 4 && grad_output.size(0) == shape.batch &&
                             grad_output.size(1) == shape.channels && grad_output.size(2) == shape.out_height() &&
                             grad_output.size(3) == shape.out_width();
    check(like_output && grad_output.scalar_type() == input.scalar_type() && device_of(grad_output) == device &&
              (shape.out_elements() == 0 || is_channels_last(grad_output)),
          "norm_relu_pool: grad_output must be like the output: [", shape.batch, ", ", shape.channels, ", ",
          shape.out_height(), ", ", shape.out_width(), "] in channels_last, of the input's dtype and device");
    checked_statistics(statistics, shape, device);
    check(choice.scalar_type() == ScalarType::Byte && choice.numel() == (shape.pool ? shape.out_elements() : 0) &&
              device_of(choice) == device && (!shape.pool || shape.out_elements() == 0 || is_channels_last(choice)),
          "norm_relu_pool: choice must be uint8 as forward returned it");
}

// Results of backward.
struct Gradients {
    Tensor input;   // as the input
    Tensor weight;  // [C] float32
    Tensor bias;    // [C] float32
};

inline Gradients make_gradients(const Tensor& input, const Shape& shape) {
    const Device device = device_of(input);
    const int32_t float32 = aoti_torch_dtype_float32();
    return Gradients{
        new_tensor(device, dtype_code(input.get()), {shape.batch, shape.channels, shape.height, shape.width}),
        new_tensor(device, float32, {shape.channels}), new_tensor(device, float32, {shape.channels})};
}

inline Running checked_running(const Tensor& mean, const Tensor& variance, const Tensor& count,
                               const Tensor& statistics, std::optional<double> momentum) {
    const Device device = device_of(mean);
    const Shape shape{0, 0, 0, mean.numel(), false};
    checked_channels(mean, "running_mean", shape, device);
    checked_channels(variance, "running_var", shape, device);
    check(count.scalar_type() == ScalarType::Long && count.numel() == 1 && device_of(count) == device,
          "norm_relu_pool: num_batches_tracked must be one int64 on the device of the running statistics");
    check(!momentum.has_value() || (*momentum >= 0 && *momentum <= 1),
          "norm_relu_pool: momentum must be from 0 to 1, or None, got ", momentum.value_or(0));
    return Running{static_cast<float*>(mean.mutable_data_ptr()),
                   static_cast<float*>(variance.mutable_data_ptr()),
                   static_cast<int64_t*>(count.mutable_data_ptr()),
                   checked_statistics(statistics, shape, device),
                   shape.channels,
                   momentum.value_or(-1)};
}

}  // namespace esper::norm_relu_pool
