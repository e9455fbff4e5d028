// What the kernels of the CPU and of CUDA have in common. Plain C++ without torch.
#pragma once

#include <cstdint>

// Marks functions that are compiled into both, so that both compute the same.
#if defined(__CUDACC__)
#define ESPER_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define ESPER_HOST_DEVICE inline __attribute__((always_inline))
#endif

namespace esper {

enum class Dtype : uint8_t { kFloat32, kBFloat16, kFloat16, kFloat64, kOther };

}  // namespace esper
