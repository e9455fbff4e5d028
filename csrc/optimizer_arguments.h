// Arguments that the steps of all optimizers have, read and checked once for both devices.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <utility>
#include <vector>

#include "optimizer.h"
#include "tensors.h"

namespace esper::optimizer {

struct Group {
    Number lr;
    Number coefficient;  // null for 1
    double weight_decay;
};

struct Arguments {
    explicit Arguments(const char* name) : op(name) {}

    const char* op;             // the operator's name, which its messages start with
    std::vector<Group> groups;  // [G]
    Scaler scaler{};
    Device device{};

    // Owners of the memory that is pointed to.
    std::vector<OwnedTensor> owned;
    std::vector<torch::stable::Tensor> held;
};

// The stack of (Tensor[] params, Tensor[] grads, a Tensor[] for each kind of state, int[] group_of, Tensor[] lr,
// float[] weight_decay, Tensor? coef, Tensor? grad_scale, Tensor? found_inf), and whatever an optimizer has after it.
struct Inputs {
    Inputs(StableIValue* stack, size_t states) {
        parameters = take_list(*stack++);
        gradients = take_list(*stack++);
        for (size_t kind = 0; kind < states; ++kind) state.push_back(take_list(*stack++));
        group_of = take_list(*stack++);
        lr = take_list(*stack++);
        weight_decay = take_list(*stack++);
        using torch::stable::detail::to;
        coef = to<std::optional<torch::stable::Tensor>>(*stack++);
        loss_scale = to<std::optional<torch::stable::Tensor>>(*stack++);
        found_inf = to<std::optional<torch::stable::Tensor>>(*stack++);
        rest = stack;
    }

    OwnedList parameters;          // [N]
    OwnedList gradients;           // [N]
    std::vector<OwnedList> state;  // a list for each kind
    OwnedList group_of;            // [N]
    OwnedList lr;                  // [G]
    OwnedList weight_decay;        // [G]
    std::optional<torch::stable::Tensor> coef;
    std::optional<torch::stable::Tensor> loss_scale;
    std::optional<torch::stable::Tensor> found_inf;
    StableIValue* rest;
};

inline Number checked_number(const Arguments& arguments, AtenTensorHandle tensor, const char* name, int64_t count = 1) {
    const int32_t code = dtype_code(tensor);
    check((code == aoti_torch_dtype_float64() || code == aoti_torch_dtype_float32()) && numel_of(tensor) == count &&
              device_of(tensor) == arguments.device,
          arguments.op, ": ", name, " must be ", count, " float32 or float64 on the parameters' device");
    return Number{const_data(tensor), code == aoti_torch_dtype_float64()};
}

// Reads learning rates, weight decays and coefficients of the groups, and the numbers of the scaler; the device is
// known.
inline void read_groups(Arguments& arguments, const Inputs& inputs) {
    const int64_t groups = list_size(inputs.lr);
    check(list_size(inputs.weight_decay) == groups, arguments.op, ": there are ", groups, " learning rates but ",
          list_size(inputs.weight_decay), " weight decays");
    Number coefficient{};
    int64_t step = 0;  // bytes from one coefficient to the next
    if (inputs.coef) {
        const Layout layout(inputs.coef->get());
        check(layout.dims == 1, arguments.op, ": coef must have one dimension, and has ", layout.dims);
        coefficient = checked_number(arguments, inputs.coef->get(), "coef", groups);
        step = layout.strides[0] * (coefficient.is_double ? 8 : 4);
        arguments.held.push_back(*inputs.coef);
    }
    for (int64_t g = 0; g < groups; ++g) {
        OwnedTensor rate = take_tensor(list_item(inputs.lr, g));
        arguments.groups.push_back(Group{checked_number(arguments, rate.get(), "lr"), coefficient,
                                         torch::stable::detail::to<double>(list_item(inputs.weight_decay, g))});
        arguments.owned.push_back(std::move(rate));
        if (coefficient.data != nullptr) coefficient.data = static_cast<const char*>(coefficient.data) + step;
    }
    const auto number = [&](const std::optional<torch::stable::Tensor>& tensor, const char* name) {
        if (!tensor) return Number{};
        arguments.held.push_back(*tensor);
        return checked_number(arguments, tensor->get(), name);
    };
    arguments.scaler = Scaler{number(inputs.loss_scale, "grad_scale"), number(inputs.found_inf, "found_inf")};
}

// The address of a gradient's elements in the order of its parameter's; takes ownership.
inline const void* read_gradient(Arguments& arguments, OwnedTensor gradient, AtenTensorHandle parameter) {
    if (Layout(gradient.get()).same_offsets(Layout(parameter))) {
        const void* data = const_data(gradient.get());
        arguments.owned.push_back(std::move(gradient));
        return data;
    }
    // The layout differs from the parameter's, which autograd permits: rare enough for a copy.
    AtenTensorHandle like = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(parameter, &like));
    torch::stable::Tensor copy = torch::stable::empty_like(torch::stable::Tensor(like));
    torch::stable::copy_(copy, torch::stable::Tensor(gradient.release()));
    const void* data = copy.const_data_ptr();
    arguments.held.push_back(std::move(copy));
    return data;
}

// Parameter `position` and its gradient; without addresses if it is empty.
inline Tensor read_tensor(Arguments& arguments, const Inputs& inputs, AtenTensorHandle parameter, int64_t position) {
    Tensor tensor{};
    tensor.dtype = dtype_of(parameter);
    check(tensor.dtype == Dtype::kFloat32 || tensor.dtype == Dtype::kBFloat16 || tensor.dtype == Dtype::kFloat64,
          arguments.op, ": parameter ", position, " must be float32, bfloat16 or float64");
    tensor.elements = numel_of(parameter);
    const auto group = torch::stable::detail::to<int64_t>(list_item(inputs.group_of, position));
    check(group >= 0 && group < static_cast<int64_t>(arguments.groups.size()), arguments.op, ": group_of[", position,
          "] is ", group, ", and there are ", arguments.groups.size(), " groups");
    tensor.group = static_cast<int32_t>(group);
    OwnedTensor gradient = take_tensor(list_item(inputs.gradients, position));
    const Layout layout(parameter);
    check(device_of(parameter) == arguments.device, arguments.op, ": parameter ", position,
          " is on another device than the rest of this call");
    check(tensor.elements == 0 || layout.is_dense(), arguments.op, ": parameter ", position, " has holes or repeats");
    check(dtype_code(gradient.get()) == dtype_code(parameter) && device_of(gradient.get()) == arguments.device &&
              Layout(gradient.get()).same_sizes(layout),
          arguments.op, ": gradient ", position, " differs from its parameter in shape, dtype or device");
    if (tensor.elements == 0) return tensor;
    tensor.parameter = mutable_data(parameter);
    tensor.gradient = read_gradient(arguments, std::move(gradient), parameter);
    return tensor;
}

// The address of a tensor of state that lies in memory as its parameter does.
inline void* read_state(Arguments& arguments, const OwnedList& list, const char* name, AtenTensorHandle parameter,
                        int64_t position) {
    OwnedTensor state = take_tensor(list_item(list, position));
    const Layout layout(parameter);
    const Layout own(state.get());
    check(dtype_code(state.get()) == dtype_code(parameter) && device_of(state.get()) == arguments.device &&
              own.same_sizes(layout) && (numel_of(parameter) == 0 || own.same_offsets(layout)),
          arguments.op, ": ", name, " ", position, " differs from its parameter in shape, strides, dtype or device");
    void* data = mutable_data(state.get());
    arguments.owned.push_back(std::move(state));
    return data;
}

}  // namespace esper::optimizer
