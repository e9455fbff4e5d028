// Functions that the CPU and the CUDA kernels share.
#pragma once

#if defined(__CUDACC__)
#define ESPER_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define ESPER_HOST_DEVICE inline
#endif
