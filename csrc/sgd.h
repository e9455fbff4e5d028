// The arithmetic of sgd_step_ that the CPU and the CUDA kernel share. Plain C++ without torch.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace esper::sgd {

// A float32 or float64 number in device memory.
struct Number {
    const void* data;
    bool is_double;
};

ESPER_HOST_DEVICE double read(const Number& number, double otherwise) {
    if (number.data == nullptr) return otherwise;
    return number.is_double ? *static_cast<const double*>(number.data)
                            : static_cast<double>(*static_cast<const float*>(number.data));
}

// Factors shared by all elements of a tensor. T is double for float64, else float.
template <typename T>
struct Factors {
    T lr;
    T scale;  // of the gradient
    T weight_decay;
    T momentum;
    bool nesterov;
};

// The scale of a group's gradient, from its clip coefficient and the scale that the loss was multiplied with. 0 means
// no step: the coefficient is 0 or NaN, or the gradient scaler found an infinity.
ESPER_HOST_DEVICE double gradient_scale(double coefficient, double loss_scale, double found_inf) {
    const bool usable = coefficient > 0 && found_inf == 0;
    return usable ? coefficient / loss_scale : 0.0;
}

// One element, as torch.optim.SGD steps it with dampening 0.
template <typename T>
ESPER_HOST_DEVICE void step(T& parameter, T gradient, T& buffer, const Factors<T>& factors) {
    const T g = gradient * factors.scale + factors.weight_decay * parameter;
    buffer = factors.momentum * buffer + g;
    parameter -= factors.lr * (factors.nesterov ? g + factors.momentum * buffer : buffer);
}

// The same without momentum, and so without a buffer.
template <typename T>
ESPER_HOST_DEVICE void step(T& parameter, T gradient, const Factors<T>& factors) {
    parameter -= factors.lr * (gradient * factors.scale + factors.weight_decay * parameter);
}

}  // namespace esper::sgd
