// Arguments of sgd_step_, read and checked once for both devices.
#pragma once

#include <vector>

#include "optimizer_arguments.h"
#include "sgd.h"

namespace esper::sgd {

// A parameter with the data of its step.
struct Tensor : optimizer::Tensor {
    void* buffer;  // null without momentum
};

struct Arguments : optimizer::Arguments {
    Arguments() : optimizer::Arguments("sgd_step_") {}

    std::vector<Tensor> tensors;  // [N], without empty ones
    double momentum = 0;
    bool nesterov = false;
};

// Reads the arguments of the schema in csrc/library.cpp from the stack.
inline Arguments read_arguments(StableIValue* stack) {
    Arguments arguments;
    const optimizer::Inputs inputs(stack, 1);
    const OwnedList& buffers = inputs.state[0];
    arguments.momentum = torch::stable::detail::to<double>(inputs.rest[0]);
    arguments.nesterov = torch::stable::detail::to<bool>(inputs.rest[1]);

    const int64_t count = list_size(inputs.parameters);
    const bool has_momentum = arguments.momentum != 0;
    check(arguments.momentum >= 0, "sgd_step_: momentum must not be negative, got ", arguments.momentum);
    check(has_momentum || !arguments.nesterov, "sgd_step_: nesterov needs momentum");
    check(list_size(inputs.gradients) == count && list_size(inputs.group_of) == count &&
              list_size(buffers) == (has_momentum ? count : 0),
          "sgd_step_: there are ", count, " parameters, ", list_size(inputs.gradients), " gradients, ",
          list_size(inputs.group_of), " group numbers and ", list_size(buffers),
          " momenta (as many with momentum, none without)");
    arguments.tensors.reserve(static_cast<size_t>(count));
    for (int64_t n = 0; n < count; ++n) {
        OwnedTensor parameter = take_tensor(list_item(inputs.parameters, n));
        if (n == 0) {
            arguments.device = device_of(parameter.get());
            read_groups(arguments, inputs);
        }
        Tensor tensor{read_tensor(arguments, inputs, parameter.get(), n), nullptr};
        if (tensor.elements == 0) continue;
        if (has_momentum) tensor.buffer = read_state(arguments, buffers, "momentum", parameter.get(), n);
        arguments.owned.push_back(std::move(parameter));
        arguments.tensors.push_back(tensor);
    }
    return arguments;
}

}  // namespace esper::sgd
