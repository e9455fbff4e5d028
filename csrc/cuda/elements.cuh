// Storage types and the value of one element, for kernels that read 16 bytes at a time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace esper {

struct Float32 {
    using Storage = float;
    static constexpr float kRoundsToZero = 0;  // the largest value that becomes zero in storage
    static __device__ float value(Storage x) { return x; }
    static __device__ Storage storage(float x) { return x; }
};
struct BFloat16 {
    using Storage = uint16_t;
    static constexpr float kRoundsToZero = 0x1p-134f;  // half of the smallest
    static __device__ float value(Storage x) { return __uint_as_float(static_cast<uint32_t>(x) << 16); }
    static __device__ Storage storage(float x) { return __bfloat16_as_ushort(__float2bfloat16_rn(x)); }
};
struct Float16 {
    using Storage = uint16_t;
    static __device__ float value(Storage x) { return __half2float(__ushort_as_half(x)); }
};
struct Float64 {
    using Storage = double;
    static __device__ double value(Storage x) { return x; }
    static __device__ Storage storage(double x) { return x; }
};

}  // namespace esper
