// A pass of norm_relu_pool over elements of one storage type, to be compiled for each instruction set.
#pragma once

#include "norm_relu_pool_backward.h"
#include "norm_relu_pool_forward.h"
#include "norm_relu_pool_passes.h"

namespace esper::norm_relu_pool {

template <typename Type>
ESPER_INLINE void run(Pass pass, const Work& work) {
    switch (pass) {
        case Pass::kStatistics:
            return statistics_pass<Type>(work);
        case Pass::kForward:
            return forward_pass<Type>(work);
        case Pass::kSums:
            return sums_pass<Type>(work);
        case Pass::kInputGradient:
            break;
    }
    if (work.batch_statistics) return gradient_pass<Type, true>(work);
    return gradient_pass<Type, false>(work);
}

}  // namespace esper::norm_relu_pool
