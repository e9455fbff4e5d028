// The passes of a tape as functions of plain pointers, compiled once for each instruction set.
#pragma once

#include "tape.h"

namespace esper::tape {

// A network as a list of instructions in sections, each with an output of its own, its last value: a forward and a
// backward pass of the first, then of the next, which may read the values of the first. Numbers are all float or all
// double.
struct Network {
    const Instruction* code;
    const int64_t* ends;  // of each section: the number of instructions up to its last
    int64_t sections;
    const int64_t* shapes;  // channels, height and width of each value; the first is the input
    int64_t value_count;
    const Tensor* tensors;
    int64_t tensor_count;
    int64_t samples;      // at most in a batch
    bool training;        // batch norms use the statistics of the batch, and update their own
    bool backward;        // gradients are wanted
    bool input_gradient;  // that of the input, too
};

// Where samples lie: sample n of a batch is row rows[n] of `data`, or row n without `rows`; strides in numbers.
struct Samples {
    const void* data;
    const int64_t* rows;
    int64_t strides[4];  // of rows, channels, height and width
};

// The memory of a network's passes.
class Runner {
 public:
    virtual ~Runner();
    // Begins a batch.
    virtual void load(const Samples& samples, int64_t count) = 0;
    virtual void forward(int64_t section) = 0;
    // Whether anything that learns lies before the output of a section.
    virtual bool learns(int64_t section) const = 0;
    // Overwrites the gradients of all tensors that the section's output depends on; `gradient` is that of the output,
    // [B, C, H, W].
    virtual void backward(int64_t section, const void* gradient) = 0;
    // Copies a value, or the gradient of the input, to [B, C, H, W].
    virtual void read(int64_t value, void* samples) const = 0;
    virtual bool has_memory(int64_t value) const = 0;
    virtual void read_gradient(int64_t value, void* samples) const = 0;
};

// One for each level of the architecture: AVX-512, AVX2 with fused multiply-add, and every machine, which alone has
// double. One runner at a time lives in a thread: it uses the thread's memory.
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__) && !defined(ESPER_ONE_LEVEL)
#define ESPER_CPU_LEVELS 1
#endif
Runner* make_runner_v4(const Network& network);
Runner* make_runner_v3(const Network& network);
Runner* make_runner_default(const Network& network, bool is_double);

}  // namespace esper::tape
