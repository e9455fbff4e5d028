// The float32 kernels of cross_entropy on the CPU, once for each instruction set.
#pragma once

#include "../cross_entropy_arguments.h"
#include "clones.h"

namespace esper::cross_entropy {

constexpr int64_t kTile = 16;  // rows of one task

// What the rows of one call are written to; null where nobody asked. Real is float or double.
template <typename Real>
struct RowOutputs {
    uint8_t* correct;  // [N]
    Real* normaliser;  // [N, 2]
};

// Writes row r and adds it to its tile. An ignored row is not correct and not counted.
template <typename Real>
ESPER_INLINE void write_row(const RowOutputs<Real>& out, Totals& totals, int64_t r, bool counted, Real max,
                            Real log_sum, Real loss, bool correct) {
    if (out.correct != nullptr) out.correct[r] = counted && correct;
    if (out.normaliser != nullptr) {
        out.normaliser[2 * r] = max;
        out.normaliser[2 * r + 1] = log_sum;
    }
    if (counted) add_row(totals, static_cast<double>(loss), correct);
}

// Each works on `rows` rows from `first` on; forward adds their statistics to `totals`.
using Forward = void (*)(const Problem& problem, const RowOutputs<float>& out, int64_t first, int64_t rows,
                         Totals& totals);
using Backward = void (*)(const Problem& problem, const float* normaliser, const GradientScale<float>& scale,
                          int64_t first, int64_t rows, void* gradient);

struct Kernels {
    Forward forward_float32;
    Forward forward_bfloat16;
    Forward forward_float16;
    Backward backward_float32;
    Backward backward_bfloat16;
    Backward backward_float16;
};

// csrc/cpu/cross_entropy_NAME.cpp
extern const Kernels kPlainKernels;
#if defined(ESPER_CPU_CLONES)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

}  // namespace esper::cross_entropy
