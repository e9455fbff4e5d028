// The passes of norm_relu_pool over bfloat16.
#pragma GCC diagnostic ignored "-Wpsabi"  // see simd.h; before all headers, for norm_relu_pool.h
#if !defined(__clang__) && !defined(ESPER_ONE_LEVEL)
#pragma GCC optimize("O2")  // as fast as with -O3, in half of the time
#endif

#include "norm_relu_pool_type.h"

namespace esper::norm_relu_pool {

ESPER_CLONES void run_bfloat16(Pass pass, const Work& work) {
    run<BFloat16Lanes>(pass, work);
}

}  // namespace esper::norm_relu_pool
