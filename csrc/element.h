// Arithmetic on single elements that CPU and CUDA kernels share is compiled into each of them.
#pragma once

#if defined(__CUDACC__)
#define ESPER_ELEMENT __host__ __device__ __forceinline__
#else
#define ESPER_ELEMENT inline __attribute__((always_inline))
#endif
