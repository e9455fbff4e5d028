// Arguments of adamw_step_, read and checked once for both devices.
#pragma once

#include <vector>

#include "adamw.h"
#include "optimizer_arguments.h"

namespace esper::adamw {

// A parameter with the data of its step.
struct Tensor : optimizer::Tensor {
    void* mean;
    void* square;
    float* step;  // number of steps done
};

struct Arguments : optimizer::Arguments {
    Arguments() : optimizer::Arguments("adamw_step_") {}

    std::vector<Tensor> tensors;  // [N], with empty ones: their steps count
    Settings settings{};
};

inline float* read_step(Arguments& arguments, OwnedTensor step, int64_t position) {
    check(dtype_code(step.get()) == aoti_torch_dtype_float32() && numel_of(step.get()) == 1 &&
              device_of(step.get()) == arguments.device,
          "adamw_step_: step ", position, " must be 1 float32 on the parameters' device");
    auto* data = static_cast<float*>(mutable_data(step.get()));
    arguments.owned.push_back(std::move(step));
    return data;
}

// Reads the arguments of the schema in csrc/library.cpp from the stack.
inline Arguments read_arguments(StableIValue* stack) {
    Arguments arguments;
    const optimizer::Inputs inputs(stack, 3);
    const OwnedList& means = inputs.state[0];
    const OwnedList& squares = inputs.state[1];
    const OwnedList& steps = inputs.state[2];
    using torch::stable::detail::to;
    const Settings settings{to<double>(inputs.rest[0]), to<double>(inputs.rest[1]), to<double>(inputs.rest[2])};
    arguments.settings = settings;

    check(settings.beta1 >= 0 && settings.beta1 < 1 && settings.beta2 >= 0 && settings.beta2 < 1,
          "adamw_step_: betas must be at least 0 and below 1, got ", settings.beta1, " and ", settings.beta2);
    check(settings.eps >= 0, "adamw_step_: eps must not be negative, got ", settings.eps);
    const int64_t count = list_size(inputs.parameters);
    check(list_size(inputs.gradients) == count && list_size(means) == count && list_size(squares) == count &&
              list_size(steps) == count && list_size(inputs.group_of) == count,
          "adamw_step_: there are ", count, " parameters, ", list_size(inputs.gradients), " gradients, ",
          list_size(means), " first moments, ", list_size(squares), " second moments, ", list_size(steps),
          " steps and ", list_size(inputs.group_of), " group numbers");
    arguments.tensors.reserve(static_cast<size_t>(count));
    for (int64_t n = 0; n < count; ++n) {
        OwnedTensor parameter = take_tensor(list_item(inputs.parameters, n));
        if (n == 0) {
            arguments.device = device_of(parameter.get());
            read_groups(arguments, inputs);
        }
        const optimizer::Tensor tensor = read_tensor(arguments, inputs, parameter.get(), n);
        void* mean = read_state(arguments, means, "first moment", parameter.get(), n);
        void* square = read_state(arguments, squares, "second moment", parameter.get(), n);
        float* step = read_step(arguments, take_tensor(list_item(steps, n)), n);
        arguments.owned.push_back(std::move(parameter));
        arguments.tensors.push_back(Tensor{tensor, mean, square, step});
    }
    return arguments;
}

}  // namespace esper::adamw
