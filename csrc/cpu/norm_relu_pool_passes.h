// The passes of norm_relu_pool on the CPU, by name: one function for each storage type.
#pragma once

#include "norm_relu_pool_work.h"

namespace esper::norm_relu_pool {

enum class Pass { kStatistics, kForward, kSums, kInputGradient };

void run_float32(Pass pass, const Work& work);
void run_bfloat16(Pass pass, const Work& work);

}  // namespace esper::norm_relu_pool
