// A stand-in for the CUDA toolkit's header of this name.
#pragma once

#include <torch/headeronly/util/Half.h>

#include <cstdint>

struct __half {
    uint16_t bits;
};

inline __half __ushort_as_half(uint16_t bits) {
    return {bits};
}
inline uint16_t __half_as_ushort(__half x) {
    return x.bits;
}
inline float __half2float(__half x) {
    return c10::detail::fp16_ieee_to_fp32_value(x.bits);
}
// To nearest even; every NaN becomes 0x7fff, as on the GPU.
inline __half __float2half_rn(float x) {
    return {x != x ? uint16_t{0x7fff} : c10::detail::fp16_ieee_from_fp32_value(x)};
}
