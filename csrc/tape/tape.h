// A network as a list of layers on numbered values, with what each layer needs to run. Plain C++ without torch.
#pragma once

#include <cstdint>

#include "../cpu/simd.h"

namespace esper::tape {

constexpr int kLanes = 16;  // samples that are computed together

// Kinds of layers. esper/ops/tape.py names them in the same order.
enum Layer : int64_t {
    kConvolution = 0,
    kBatchNorm,
    kGroupNorm,
    kActivation,
    kMaxPool,
    kAveragePool,
    kFlatten,
    kScale,        // each channel by a parameter
    kMultiply,     // by another value, of each element, channel or sample
    kAdd,          // a factor times another value, the factor a number in memory or constant
    kDetach,       // the same numbers, through which no gradient passes
    kGuard,        // the same numbers, or zeros once they have not been finite
    kPassThrough,  // the same numbers, whose gradient another value learns from
    kLinear,       // of vectors
    kEmbedding,    // of tokens and their positions; it and the next are for sequences, whose positions are samples
    kAttention,
    kRunningMean,  // over the positions up to each
    kLayerCount,
};

constexpr int kNumbers = 16;  // columns of the code
constexpr int kConstants = 2;
constexpr int64_t kMaxTaps = 128;  // of a convolution's kernel

// A row of the code.
struct Instruction {
    int64_t layer;
    int64_t input;  // number of a value, as the following two; `other` is -1 for layers of one input
    int64_t other;
    int64_t output;
    int64_t number[kNumbers - 4];  // explained at the top of the layer's file
    const double* constant;        // kConstants
};

// A tensor of the network: a parameter, a buffer or a number.
struct Tensor {
    void* data;
    void* gradient;      // null if it does not learn
    int64_t strides[4];  // of its dimensions, and of those of the gradient
    int64_t elements;
    bool is_count;  // int64
    bool is_flag;   // bool
};

}  // namespace esper::tape
