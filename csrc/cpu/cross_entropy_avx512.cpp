// The kernels of cross_entropy for AVX-512.
#include "clones.h"

#if defined(ESPER_CPU_CLONES)
#define ESPER_TARGET __attribute__((target("avx512f")))
#define ESPER_WIDE_BYTES 64
#define ESPER_KERNELS kAvx512Kernels
#include "cross_entropy_rows.h"
#endif
