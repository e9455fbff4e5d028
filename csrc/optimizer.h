// What the steps of all optimizers have in common on the CPU and in CUDA kernels. Plain C++ without torch.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace esper::optimizer {

// A parameter with its gradient. Optimizers add the tensors of their state.
struct Tensor {
    void* parameter;
    const void* gradient;
    int64_t elements;
    int32_t group;
    Dtype dtype;
};

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

// Numbers of a gradient scaler.
struct Scaler {
    Number loss_scale;  // null if there is none
    Number found_inf;   // likewise
};

// The scale of a group's gradient, from its clip coefficient and the scale that the loss was multiplied with. 0 means
// no step: the coefficient is 0 or NaN, or the gradient scaler found an infinity.
ESPER_HOST_DEVICE double gradient_scale(const Number& coefficient, const Scaler& scaler) {
    const double clip = read(coefficient, 1);
    const bool usable = clip > 0 && read(scaler.found_inf, 0) == 0;
    return usable ? clip / read(scaler.loss_scale, 1) : 0.0;
}

}  // namespace esper::optimizer
