// Storage types: the type Real that is computed with, and conversions of one element.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace esper {

template <typename T>
struct Unchanged {
    using Storage = T;
    using Real = T;
    static constexpr T kRoundsToZero = 0;  // the largest value that becomes zero in storage
    static __device__ T value(Storage x) { return x; }
    static __device__ Storage storage(T x) { return x; }
};
using Float32 = Unchanged<float>;
using Float64 = Unchanged<double>;
struct BFloat16 {
    using Storage = uint16_t;
    using Real = float;
    static constexpr float kRoundsToZero = 0x1p-134f;  // half of the smallest
    static __device__ float value(Storage x) { return __uint_as_float(static_cast<uint32_t>(x) << 16); }
    static __device__ Storage storage(float x) { return __bfloat16_as_ushort(__float2bfloat16_rn(x)); }
};
struct Float16 {
    using Storage = uint16_t;
    using Real = float;
    static __device__ float value(Storage x) { return __half2float(__ushort_as_half(x)); }
    static __device__ Storage storage(float x) { return __half_as_ushort(__float2half_rn(x)); }
};

}  // namespace esper
