// GELU, x · Φ(x), of 16 numbers in float32 as vector code; in float64 it is that of libm.
#pragma once

#include <cmath>

#include "lanes.h"

namespace esper::tape {
namespace {

// erf within 3e-7: a quotient of polynomials in x for |x| < 4, beyond which it is 1 to the last place. The coefficients
// are those of Eigen's erf for float32.
ESPER_INLINE FloatVector erf_of(const FloatVector& x) {
    const auto term = [](const FloatVector& sum, const FloatVector& square, float next)
                          __attribute__((always_inline)) { return fma(sum, square, FloatVector{} + next); };
    const FloatVector square = x * x;
    FloatVector above = term(FloatVector{} - 2.72614225801306e-10f, square, 2.77068142495902e-08f);
    above = term(above, square, -2.10102402082508e-06f);
    above = term(above, square, -5.69250639462346e-05f);
    above = term(above, square, -7.34990630326855e-04f);
    above = term(above, square, -2.95459980854025e-03f);
    above = term(above, square, -1.60960333262415e-02f);
    FloatVector below = term(FloatVector{} - 1.45660718464996e-05f, square, -2.13374055278905e-04f);
    below = term(below, square, -1.68282697438203e-03f);
    below = term(below, square, -7.37332916720468e-03f);
    below = term(below, square, -1.42647390514189e-02f);
    const FloatVector one = FloatVector{} + 1.0f;
    const FloatVector inside = x * above / below;
    return x >= 4.0f ? one : x <= -4.0f ? -one : inside;
}

ESPER_INLINE Lanes<float> gelu(const Lanes<float>& x) {
    return each(x, [](const auto& part)
                       __attribute__((always_inline)) { return part * 0.5f * (1.0f + erf_of(part * 0.70710678f)); });
}

// Φ(x) + x φ(x), with φ(x) = exp(-x² / 2) / sqrt(2π).
ESPER_INLINE Lanes<float> gelu_slope(const Lanes<float>& x) {
    return each(x, [](const auto& part) __attribute__((always_inline)) {
        const FloatVector density = 0.39894228f * Vectors<kBytes>::exp_negative(part * part * -0.5f);
        return 0.5f * (1.0f + erf_of(part * 0.70710678f)) + part * density;
    });
}

}  // namespace
}  // namespace esper::tape
