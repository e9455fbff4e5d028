// The passes of a tape as functions of plain pointers, compiled once for each instruction set.
#pragma once

#include "tape.h"

namespace esper::tape {

// One batch of samples through a tape and, with a gradient of the output, back. Numbers are all float or all double.
struct Pass {
    const Instruction* code;
    int64_t instructions;
    const int64_t* shapes;  // channels, height and width of each value; the first is the input, the last the output
    int64_t value_count;
    const Tensor* tensors;
    int64_t tensor_count;
    int64_t samples;
    bool training;
    void* input;
    void* output;
    void* output_gradient;  // null: only forward
    void* input_gradient;   // null if it is not wanted
};

// One for each level of the architecture: AVX-512, AVX2 with fused multiply-add, and every machine.
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__)
#define ESPER_CPU_LEVELS 1
#endif
void pass_v4(const Pass& pass, bool is_double);
void pass_v3(const Pass& pass, bool is_double);
void pass_default(const Pass& pass, bool is_double);

}  // namespace esper::tape
