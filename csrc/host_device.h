// Marks functions that are compiled into the kernels of the CPU and of CUDA, so that both compute the same.
#pragma once

#if defined(__CUDACC__)
#define ESPER_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define ESPER_HOST_DEVICE inline __attribute__((always_inline))
#endif
