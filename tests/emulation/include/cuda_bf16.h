// A stand-in for the CUDA toolkit's header of this name.
#pragma once

#include <cstdint>
#include <cstring>

struct __nv_bfloat16 {
    uint16_t bits;
};

// To nearest even; every NaN becomes 0x7fff, as on the GPU.
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    if (x != x) return {0x7fff};
    return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}
inline uint16_t __bfloat16_as_ushort(__nv_bfloat16 x) {
    return x.bits;
}
