// The arithmetic of sgd_step_ that the CPU and the CUDA kernel share. Plain C++ without torch.
#pragma once

#include "host_device.h"

namespace esper::sgd {

// Factors shared by all elements of a tensor. T is double for float64, else float.
template <typename T>
struct Factors {
    T lr;
    T scale;  // of the gradient
    T weight_decay;
    T momentum;
    bool nesterov;
};

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
