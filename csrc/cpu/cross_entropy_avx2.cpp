// The kernels of cross_entropy for AVX2 and FMA.
#include "clones.h"

#if defined(ESPER_CPU_CLONES)
#define ESPER_TARGET __attribute__((target("avx2,fma")))
#define ESPER_WIDE_BYTES 32
#define ESPER_KERNELS kAvx2Kernels
#include "cross_entropy_rows.h"
#endif
