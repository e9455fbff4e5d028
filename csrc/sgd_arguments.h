// Arguments of sgd_step_, read and checked once for both devices.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <utility>
#include <vector>

#include "sgd.h"
#include "tensors.h"

namespace esper::sgd {

// A parameter with the data of its step.
struct Tensor {
    void* parameter;
    const void* gradient;
    void* buffer;  // null without momentum
    int64_t elements;
    int64_t group;
    Dtype dtype;
};

struct Group {
    Number lr;
    Number coefficient;  // null for 1
    double weight_decay;
};

struct Arguments {
    std::vector<Tensor> tensors;  // [N]
    std::vector<Group> groups;    // [G]
    Number loss_scale;            // null if there is none
    Number found_inf;             // likewise
    double momentum;
    bool nesterov;
    Device device;

    // Owners of the memory above.
    std::vector<OwnedTensor> owned;
    std::vector<torch::stable::Tensor> held;
};

inline Number checked_number(AtenTensorHandle tensor, const char* name, Device device, int64_t count = 1) {
    const int32_t code = dtype_code(tensor);
    check((code == aoti_torch_dtype_float64() || code == aoti_torch_dtype_float32()) && numel_of(tensor) == count &&
              device_of(tensor) == device,
          "sgd_step_: ", name, " must be ", count, " float32 or float64 on the parameters' device");
    return Number{const_data(tensor), code == aoti_torch_dtype_float64()};
}

inline void read_tensor(Arguments& arguments, OwnedTensor parameter, OwnedTensor gradient, OwnedTensor buffer,
                        int64_t group, int64_t position) {
    Tensor tensor{};
    tensor.dtype = dtype_of(parameter.get());
    check(tensor.dtype == Dtype::kFloat32 || tensor.dtype == Dtype::kBFloat16 || tensor.dtype == Dtype::kFloat64,
          "sgd_step_: parameter ", position, " must be float32, bfloat16 or float64");
    tensor.elements = numel_of(parameter.get());
    tensor.group = group;
    check(group >= 0 && group < static_cast<int64_t>(arguments.groups.size()), "sgd_step_: group_of[", position,
          "] is ", group, ", and there are ", arguments.groups.size(), " groups");
    const Layout layout(parameter.get());
    const Layout gradient_layout(gradient.get());
    check(device_of(parameter.get()) == arguments.device, "sgd_step_: parameter ", position,
          " is on another device than the rest of this call");
    check(tensor.elements == 0 || layout.is_dense(), "sgd_step_: parameter ", position, " has holes or repeats");
    check(dtype_code(gradient.get()) == dtype_code(parameter.get()) && device_of(gradient.get()) == arguments.device &&
              gradient_layout.same_sizes(layout),
          "sgd_step_: gradient ", position, " differs from its parameter in shape, dtype or device");
    if (tensor.elements == 0) return;
    tensor.parameter = mutable_data(parameter.get());
    if (buffer) {
        const Layout buffer_layout(buffer.get());
        check(dtype_code(buffer.get()) == dtype_code(parameter.get()) && device_of(buffer.get()) == arguments.device &&
                  buffer_layout.same_sizes(layout) && buffer_layout.same_offsets(layout),
              "sgd_step_: momentum ", position, " differs from its parameter in shape, strides, dtype or device");
        tensor.buffer = mutable_data(buffer.get());
        arguments.owned.push_back(std::move(buffer));
    }
    if (gradient_layout.same_offsets(layout)) {
        tensor.gradient = const_data(gradient.get());
        arguments.owned.push_back(std::move(gradient));
    } else {
        // The layout differs from the parameter's, which autograd permits: rare enough for a copy.
        AtenTensorHandle like = nullptr;
        TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(parameter.get(), &like));
        torch::stable::Tensor copy = torch::stable::empty_like(torch::stable::Tensor(like));
        torch::stable::copy_(copy, torch::stable::Tensor(gradient.release()));
        tensor.gradient = copy.const_data_ptr();
        arguments.held.push_back(std::move(copy));
    }
    arguments.owned.push_back(std::move(parameter));
    arguments.tensors.push_back(tensor);
}

// Reads learning rates, weight decays and, unless null, the coefficients of the groups.
inline void read_groups(Arguments& arguments, const OwnedList& lr, const OwnedList& weight_decay,
                        const std::optional<torch::stable::Tensor>& coef) {
    const int64_t groups = list_size(lr);
    check(list_size(weight_decay) == groups, "sgd_step_: there are ", groups, " learning rates but ",
          list_size(weight_decay), " weight decays");
    Number coefficient{};
    int64_t step = 0;  // bytes from one coefficient to the next
    if (coef) {
        const Layout layout(coef->get());
        check(layout.dims == 1, "sgd_step_: coef must have one dimension, and has ", layout.dims);
        coefficient = checked_number(coef->get(), "coef", arguments.device, groups);
        step = layout.strides[0] * (coefficient.is_double ? 8 : 4);
        arguments.held.push_back(*coef);
    }
    for (int64_t g = 0; g < groups; ++g) {
        OwnedTensor rate = take_tensor(list_item(lr, g));
        arguments.groups.push_back(Group{checked_number(rate.get(), "lr", arguments.device), coefficient,
                                         torch::stable::detail::to<double>(list_item(weight_decay, g))});
        arguments.owned.push_back(std::move(rate));
        if (coefficient.data != nullptr) coefficient.data = static_cast<const char*>(coefficient.data) + step;
    }
}

// Reads (Tensor[] params, Tensor[] grads, Tensor[] momenta, int[] group_of, Tensor[] lr, float[] weight_decay,
// Tensor? coef, Tensor? grad_scale, Tensor? found_inf, float momentum, bool nesterov) from the stack.
inline Arguments read_arguments(StableIValue* stack) {
    Arguments arguments{};
    const OwnedList parameters = take_list(stack[0]);
    const OwnedList gradients = take_list(stack[1]);
    const OwnedList buffers = take_list(stack[2]);
    const OwnedList group_of = take_list(stack[3]);
    const OwnedList lr = take_list(stack[4]);
    const OwnedList weight_decay = take_list(stack[5]);
    using torch::stable::detail::to;
    using Optional = std::optional<torch::stable::Tensor>;
    const auto coef = to<Optional>(stack[6]);
    const auto loss_scale = to<Optional>(stack[7]);
    const auto found_inf = to<Optional>(stack[8]);
    arguments.momentum = to<double>(stack[9]);
    arguments.nesterov = to<bool>(stack[10]);

    const int64_t count = list_size(parameters);
    const bool has_momentum = arguments.momentum != 0;
    check(arguments.momentum >= 0, "sgd_step_: momentum must not be negative, got ", arguments.momentum);
    check(has_momentum || !arguments.nesterov, "sgd_step_: nesterov needs momentum");
    check(list_size(gradients) == count && list_size(group_of) == count &&
              list_size(buffers) == (has_momentum ? count : 0),
          "sgd_step_: there are ", count, " parameters, ", list_size(gradients), " gradients, ", list_size(group_of),
          " group numbers and ", list_size(buffers), " momenta (as many with momentum, none without)");
    arguments.tensors.reserve(static_cast<size_t>(count));
    for (int64_t n = 0; n < count; ++n) {
        OwnedTensor parameter = take_tensor(list_item(parameters, n));
        if (n == 0) {
            arguments.device = device_of(parameter.get());
            read_groups(arguments, lr, weight_decay, coef);
            if (loss_scale) arguments.loss_scale = checked_number(loss_scale->get(), "grad_scale", arguments.device);
            if (found_inf) arguments.found_inf = checked_number(found_inf->get(), "found_inf", arguments.device);
        }
        read_tensor(arguments, std::move(parameter), take_tensor(list_item(gradients, n)),
                    has_momentum ? take_tensor(list_item(buffers, n)) : nullptr, to<int64_t>(list_item(group_of, n)),
                    n);
    }
    if (loss_scale) arguments.held.push_back(*loss_scale);
    if (found_inf) arguments.held.push_back(*found_inf);
    return arguments;
}

}  // namespace esper::sgd
