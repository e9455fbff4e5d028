// The arithmetic of adamw_step_ that the CPU and the CUDA kernel share. Plain C++ without torch.
#pragma once

#include <cmath>

#include "host_device.h"

namespace esper::adamw {

struct Settings {
    double beta1;
    double beta2;
    double eps;
};

// Factors shared by all elements of a tensor. T is double for float64, else float.
template <typename T>
struct Factors {
    T scale;          // of the gradient
    T kept;           // of the parameter, after decay
    T mean_weight;    // of the way from the mean to the gradient, see `step`
    T beta2;          // of the mean square
    T square_weight;  // of the square
    T rate;
    T eps;
    bool near_mean;  // whether the new mean is nearer to the old one than to the gradient
};

template <typename T>
ESPER_HOST_DEVICE Factors<T> rounded(const Factors<double>& factors) {
    return Factors<T>{static_cast<T>(factors.scale),         static_cast<T>(factors.kept),
                      static_cast<T>(factors.mean_weight),   static_cast<T>(factors.beta2),
                      static_cast<T>(factors.square_weight), static_cast<T>(factors.rate),
                      static_cast<T>(factors.eps),           factors.near_mean};
}

// The factors of step number `count`, from 1.
//
// With c1 = 1 - beta1^count and c2 = sqrt(1 - beta2^count), a parameter moves by lr * (m / c1) / (sqrt(v) / c2 + eps).
// Numerator and denominator times c2 leave one division for each element: (lr * c2 / c1) * m / (sqrt(v) + eps * c2).
ESPER_HOST_DEVICE Factors<double> factors_of(double lr, double weight_decay, double scale, double count,
                                             const Settings& settings) {
    const double c1 = 1 - std::pow(settings.beta1, count);
    const double c2 = std::sqrt(1 - std::pow(settings.beta2, count));
    const bool near_mean = settings.beta1 > 0.5;
    return Factors<double>{scale,
                           1 - lr * weight_decay,
                           near_mean ? 1 - settings.beta1 : settings.beta1,
                           settings.beta2,
                           1 - settings.beta2,
                           lr * c2 / c1,
                           settings.eps * c2,
                           near_mean};
}

// One element, as torch.optim.AdamW steps it.
template <typename T>
ESPER_HOST_DEVICE void step(T& parameter, T gradient, T& mean, T& square, const Factors<T>& factors) {
    const T g = gradient * factors.scale;
    // The new mean lies between the old one and the gradient; seen from the nearer of them, no digits are lost.
    const T way = factors.mean_weight * (g - mean);
    mean = factors.near_mean ? mean + way : g - way;
    square = factors.beta2 * square + factors.square_weight * g * g;
    parameter = factors.kept * parameter - factors.rate * mean / (std::sqrt(square) + factors.eps);
}

}  // namespace esper::adamw
