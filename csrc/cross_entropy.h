// The arithmetic of cross_entropy that the CPU and the CUDA kernel share: how the logits of a row become a loss, a
// correctness and a gradient, and how rows become statistics. Plain C++ without torch, callable on both sides.
//
// Real is float for logits of up to 32 bits and double for float64.
#pragma once

#include <cmath>
#include <cstdint>

#include "host_device.h"

namespace esper::cross_entropy {

// Last dimension of an accumulator block [E, K, kFieldCount]. esper/ops/accumulators.py names them in the same order.
enum Field : int {
    kLossSum = 0,  // sum of the losses of all counted samples
    kCorrect,      // counted samples whose target has the largest logit
    kCount,        // counted samples: those whose target is not ignore_index
    kBatches,      // calls
    kNotFinite,    // counted samples whose loss is NaN or infinite
    kFieldCount,
};

// Logits and targets as rows, for every shape of the arguments.
struct Rows {
    const void* logits;      // [N, C] contiguous
    const int64_t* targets;  // [N]
    int64_t rows;            // N: samples, or tokens of all sequences
    int64_t classes;         // C
    int64_t samples;         // B
    int64_t sequence;        // tokens of a sequence, T; 1 for classification
    int64_t ignore_index;
    double smoothing;
};

// Statistics of some rows. Counts are doubles (exact up to 2^53), so that they can be added to a float64 block.
struct Totals {
    double loss;
    double correct;
    double count;
    double not_finite;
};

ESPER_HOST_DEVICE void add(Totals& into, const Totals& other) {
    into.loss += other.loss;
    into.correct += other.correct;
    into.count += other.count;
    into.not_finite += other.not_finite;
}

ESPER_HOST_DEVICE void add_row(Totals& into, double loss, bool correct) {
    into.loss += loss;
    into.correct += correct ? 1.0 : 0.0;
    into.count += 1.0;
    into.not_finite += std::isfinite(loss) ? 0.0 : 1.0;
}

// Mean over the counted samples; NaN without one, as in F.cross_entropy.
ESPER_HOST_DEVICE double mean_loss(const Totals& totals) {
    return totals.count > 0 ? totals.loss / totals.count : static_cast<double>(NAN);
}

// Adds one call to a row [kFieldCount].
ESPER_HOST_DEVICE void accumulate(const Totals& totals, double* row) {
    row[kLossSum] += totals.loss;
    row[kCorrect] += totals.correct;
    row[kCount] += totals.count;
    row[kBatches] += 1.0;
    row[kNotFinite] += totals.not_finite;
}

// Whether a logit ranks before the target's in argmax: NaN is above everything, and the first of equals wins.
template <typename Real>
ESPER_HOST_DEVICE bool beats(Real x, Real target_logit, bool before_target) {
    if (std::isnan(x)) return before_target || !std::isnan(target_logit);
    if (std::isnan(target_logit)) return false;
    return before_target ? x >= target_logit : x > target_logit;
}

// Sums over a row, or over a part of it, after reading each logit once.
template <typename Real>
struct RowSums {
    Real max;      // of the logits that are not NaN; -inf without one
    Real sum;      // sum of exp(logit - max) over logits above -inf; NaN once a logit was
    double total;  // sum of the logits; only with label smoothing
    bool beaten;   // a logit beats the target's
};

template <typename Real>
ESPER_HOST_DEVICE RowSums<Real> empty_row() {
    return RowSums<Real>{static_cast<Real>(-INFINITY), 0, 0, false};
}

// exp(from - to), the factor that brings a sum from one maximum to a larger one. A sum without a maximum is 0 or NaN
// and stays so.
template <typename Real>
ESPER_HOST_DEVICE Real rescale(Real from, Real to) {
    return from == static_cast<Real>(-INFINITY) ? static_cast<Real>(1) : std::exp(from - to);
}

template <typename Real>
ESPER_HOST_DEVICE void add_logit(RowSums<Real>& row, Real x, Real target_logit, bool before_target, bool smooth) {
    row.beaten = row.beaten || beats(x, target_logit, before_target);
    if (smooth) row.total += x;
    if (x == static_cast<Real>(-INFINITY)) return;
    if (x > row.max) {
        row.sum = row.sum * rescale(row.max, x) + 1;
        row.max = x;
    } else {
        row.sum += std::exp(x - row.max);
    }
}

// Joins two parts of one row.
template <typename Real>
ESPER_HOST_DEVICE void merge(RowSums<Real>& into, const RowSums<Real>& other) {
    const Real max = other.max > into.max ? other.max : into.max;
    into.sum = into.sum * rescale(into.max, max) + other.sum * rescale(other.max, max);
    into.max = max;
    into.total += other.total;
    into.beaten = into.beaten || other.beaten;
}

// log of sum over exp(logit - max). A row without a finite maximum has no distribution: NaN, as in log_softmax.
template <typename Real>
ESPER_HOST_DEVICE Real log_sum(const RowSums<Real>& row) {
    return std::isfinite(row.max) ? std::log(row.sum) : static_cast<Real>(NAN);
}

// (1 - smoothing) * -log p(target) + smoothing * mean over the classes of -log p, as F.cross_entropy defines it. The
// maximum is subtracted before the logarithm is added, so that large logits lose no digits.
template <typename Real>
ESPER_HOST_DEVICE Real row_loss(const RowSums<Real>& row, Real log_sum, Real target_logit, int64_t classes,
                                double smoothing) {
    const Real loss = log_sum - (target_logit - row.max);
    if (smoothing == 0) return loss;
    const double mean = row.total / static_cast<double>(classes) - static_cast<double>(row.max);
    return static_cast<Real>((1 - smoothing) * static_cast<double>(loss) +
                             smoothing * (static_cast<double>(log_sum) - mean));
}

// Factors shared by all elements of a gradient.
template <typename Real>
struct GradientScale {
    Real scale;    // gradient of the mean loss / counted samples
    Real target;   // weight of the target class, 1 - smoothing
    Real uniform;  // weight of every class, smoothing / classes
};

template <typename Real>
ESPER_HOST_DEVICE GradientScale<Real> gradient_scale(double grad_loss, double count, int64_t classes,
                                                     double smoothing) {
    // Without a counted sample every row is ignored and no scale is used.
    return GradientScale<Real>{static_cast<Real>(count > 0 ? grad_loss / count : 0.0), static_cast<Real>(1 - smoothing),
                               static_cast<Real>(smoothing / static_cast<double>(classes))};
}

// d loss / d logit = (softmax - target distribution) * scale.
template <typename Real>
ESPER_HOST_DEVICE Real gradient_of(Real x, Real max, Real log_sum, bool is_target, const GradientScale<Real>& scale) {
    const Real p = std::exp((x - max) - log_sum);
    return (p - scale.uniform - (is_target ? scale.target : static_cast<Real>(0))) * scale.scale;
}

}  // namespace esper::cross_entropy
