// The arithmetic of grad_stats that the CPU and the CUDA kernel share: what is counted, and how the counts of a tensor
// become the statistics of a group. Plain C++ without torch, callable on both sides.
#pragma once

#include <cmath>
#include <cstdint>

#include "host_device.h"

namespace esper::grad_stats {

// Columns of `fields` [G, kFieldCount]. esper/ops/grad_stats.py names them in the same order.
enum Field : int {
    kSumSq = 0,  // sum of squares of all elements
    kNorm,       // its square root: the global L2 norm
    kTensors,    // tensors that hold at least one element
    kElements,   // their elements
    kMinNorm,    // smallest and
    kMaxNorm,    // largest norm of a single tensor; 0 without tensors
    kVanishing,  // tensors with norm < kVanishingNorm
    kExploding,  // tensors with norm > exploding_norm, or not finite
    kNan,        // elements that are NaN,
    kInf,        // infinite,
    kZero,       // or exactly zero
    kHealth,     // 0 (unusable or not measured) to 1 (all tensors in range)
    kClipCoef,   // factor that brings the group to max_norm; 0 if no step should be taken
    kFieldCount,
};

constexpr double kVanishingNorm = 1e-7;
// The epsilon of torch.nn.utils.clip_grads_with_norm_, so that clipping gives the same numbers.
constexpr double kClipEpsilon = 1e-6;

// A float32 sum of squares inside these bounds has lost nothing that float64 would have kept: no square overflowed, and
// squares that underflowed (below 1.2e-38) are too small to matter. Outside them it is redone in float64.
constexpr float kTrustedMin = 1e-25f;
constexpr float kTrustedMax = 1e30f;

// Statistics of a run of elements: a block, a chunk or a whole tensor. Counts are doubles (exact up to 2^53), so that a
// record is a row of a float64 tensor.
struct Totals {
    double sum_sq;
    double nan;
    double inf;
    double zero;
    double elements;
};

ESPER_HOST_DEVICE void add(Totals& into, const Totals& other) {
    into.sum_sq += other.sum_sq;
    into.nan += other.nan;
    into.inf += other.inf;
    into.zero += other.zero;
    into.elements += other.elements;
}

// One element, exactly.
ESPER_HOST_DEVICE void add_element(Totals& into, double value) {
    into.sum_sq += value * value;
    into.nan += std::isnan(value) ? 1.0 : 0.0;
    into.inf += std::isinf(value) ? 1.0 : 0.0;
}

struct GroupTotals {
    Totals all;
    double tensors;
    double min_norm;
    double max_norm;
    double vanishing;
    double exploding;
};

ESPER_HOST_DEVICE GroupTotals empty_group() {
    return GroupTotals{{0, 0, 0, 0, 0}, 0, INFINITY, 0, 0, 0};
}

// min and max that keep a NaN once seen, as torch.amin and torch.amax do (fmin and fmax would drop it).
ESPER_HOST_DEVICE double min_keeping_nan(double a, double b) {
    return (a < b || std::isnan(a)) ? a : b;
}
ESPER_HOST_DEVICE double max_keeping_nan(double a, double b) {
    return (a > b || std::isnan(a)) ? a : b;
}

// Adds one tensor to its group. A tensor without elements was not measured and leaves the group as it is.
ESPER_HOST_DEVICE void add_tensor(GroupTotals& group, const Totals& tensor, double exploding_norm) {
    if (tensor.elements == 0) return;
    const double norm = std::sqrt(tensor.sum_sq);
    add(group.all, tensor);
    group.tensors += 1;
    group.min_norm = min_keeping_nan(group.min_norm, norm);
    group.max_norm = max_keeping_nan(group.max_norm, norm);
    group.vanishing += norm < kVanishingNorm ? 1.0 : 0.0;
    group.exploding += (norm > exploding_norm || !std::isfinite(norm)) ? 1.0 : 0.0;
}

// Joins two halves of one group; used if several threads share a group.
ESPER_HOST_DEVICE void merge(GroupTotals& into, const GroupTotals& other) {
    add(into.all, other.all);
    into.tensors += other.tensors;
    into.min_norm = min_keeping_nan(into.min_norm, other.min_norm);
    into.max_norm = max_keeping_nan(into.max_norm, other.max_norm);
    into.vanishing += other.vanishing;
    into.exploding += other.exploding;
}

// Writes one row of `fields` [kFieldCount].
ESPER_HOST_DEVICE void write_fields(const GroupTotals& group, double max_norm, double* row) {
    const double norm = std::sqrt(group.all.sum_sq);
    const bool measured = group.tensors > 0;
    const bool usable = std::isfinite(norm);

    double health = 0.0;  // not measured is not passed
    if (measured && usable) {
        const double bad = (0.5 * group.vanishing + 0.8 * group.exploding) / group.tensors;
        health = bad < 1.0 ? 1.0 - bad : 0.0;
    }
    // A norm that is not finite gives no direction. torch's formula would return NaN, or 0 for an infinite norm; 0 in
    // both cases is a value that no usable gradient produces, so a step can read it as "skip".
    double clip_coef = 0.0;
    if (usable) {
        clip_coef = max_norm / (norm + kClipEpsilon);
        clip_coef = clip_coef < 1.0 ? clip_coef : 1.0;
    }

    row[kSumSq] = group.all.sum_sq;
    row[kNorm] = norm;
    row[kTensors] = group.tensors;
    row[kElements] = group.all.elements;
    row[kMinNorm] = measured ? group.min_norm : 0.0;
    row[kMaxNorm] = group.max_norm;
    row[kVanishing] = group.vanishing;
    row[kExploding] = group.exploding;
    row[kNan] = group.all.nan;
    row[kInf] = group.all.inf;
    row[kZero] = group.all.zero;
    row[kHealth] = health;
    row[kClipCoef] = clip_coef;
}

}  // namespace esper::grad_stats
