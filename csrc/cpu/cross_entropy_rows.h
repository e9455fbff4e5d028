// Rows of logits of up to 32 bits to losses and gradients, for registers of any width. The policy is in
// cross_entropy.cpp, which alone includes this.
#pragma once

#include <algorithm>
#include <type_traits>

#include "../cross_entropy_arguments.h"
#include "simd.h"

namespace esper::cross_entropy {
namespace {

constexpr int64_t kTile = 16;     // rows of one task
constexpr int64_t kNarrow = 128;  // max classes for a lane a row
constexpr int64_t kBlock = 1024;  // logits of a row looked at together

// Outputs of one call; null if not wanted. Real is float or double.
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

// Whether no logit beats the target's. In a row with a softmax, the target's logit must be the largest, and none before
// it may equal it; in any other row, all logits are compared. `before` is the largest before the target.
template <typename Type>
ESPER_INLINE bool is_right(const typename Type::Storage* logits, int64_t classes, int64_t target, float target_logit,
                           float max, float before, float log_sum) {
    if (std::isfinite(log_sum)) return target_logit == max && before < max;
    float values[Type::kLanes];
    for (int64_t c = 0; c < classes; ++c) {
        read_many<Type>(logits + c, 1, 0.0f, values);
        if (beats(values[0], target_logit, c < target)) return false;
    }
    return true;
}

// --- forward: few classes, a lane a row ---------------------------------------------------------------------------

template <typename Type>
ESPER_INLINE void narrow_tile(const Problem& problem, const RowOutputs<float>& out, int64_t first, int64_t rows,
                              Totals& totals) {
    using Floats = typename Type::Floats;
    constexpr int64_t kLanes = Type::kLanes;
    const auto classes = static_cast<int32_t>(problem.classes);
    const auto* logits = static_cast<const typename Type::Storage*>(problem.logits) + first * classes;
    float row_major[kLanes * kNarrow];   // [rows, C]
    float transposed[kNarrow * kLanes];  // [C, rows]
    read_many<Type>(logits, rows * classes, 0.0f, row_major);
    for (int64_t i = rows * classes; i < kLanes * classes; ++i) row_major[i] = 0.0f;  // rows past the end
    for (int64_t c = 0; c < classes; ++c) {
        for (int64_t l = 0; l < kLanes; ++l) transposed[c * kLanes + l] = row_major[l * classes + c];
    }

    int32_t target[kLanes];
    float target_logit[kLanes];
    for (int64_t l = 0; l < kLanes; ++l) {
        const int64_t t = l < rows ? problem.targets[first + l] : problem.ignore_index;
        target[l] = t == problem.ignore_index ? -1 : static_cast<int32_t>(t);
        target_logit[l] = target[l] < 0 ? 0.0f : row_major[l * classes + target[l]];
    }
    const auto t = bits_as<typename Type::Ints>(target);

    const Floats nothing = Floats{} - INFINITY;
    Floats max = nothing;
    Floats before = nothing;  // largest of the logits before the target's
    for (int32_t c = 0; c < classes; ++c) {
        const Floats x = Type::load(transposed + c * kLanes);
        max = x > max ? x : max;
        const Floats candidate = t > c ? x : nothing;
        before = candidate > before ? candidate : before;
    }
    Floats sum = {}, total = {};
    for (int32_t c = 0; c < classes; ++c) {
        // NaN if the largest is infinite: such a row has no distribution.
        const Floats below = Type::load(transposed + c * kLanes) - max;
        sum += Type::exp_negative(below);
        total += below;
    }
    const Floats log_sums = Type::log_positive(sum);
    Floats loss = log_sums - (Type::load(target_logit) - max);
    if (problem.smoothing != 0) {
        const auto smoothing = static_cast<float>(problem.smoothing);
        loss = (1 - smoothing) * loss + smoothing * (log_sums - total / static_cast<float>(classes));
    }

    float max_of[kLanes], before_of[kLanes], log_sum_of[kLanes], loss_of[kLanes];
    Type::store(max, max_of);
    Type::store(before, before_of);
    Type::store(log_sums, log_sum_of);
    Type::store(loss, loss_of);
    Totals mine{0, 0, 0, 0};
    for (int64_t l = 0; l < rows; ++l) {
        const bool right = is_right<Type>(logits + l * classes, classes, target[l], target_logit[l], max_of[l],
                                          before_of[l], log_sum_of[l]);
        write_row(out, mine, first + l, target[l] >= 0, max_of[l], log_sum_of[l], loss_of[l], right);
    }
    add(totals, mine);
}

// --- forward: many classes, a row in blocks -----------------------------------------------------------------------

// The largest of `values` [n] that is not NaN, -inf without one.
template <typename Type>
ESPER_INLINE float largest(const float* values, int64_t n) {
    using Floats = typename Type::Floats;
    constexpr int64_t kLanes = Type::kLanes;
    Floats lanes = Floats{} - INFINITY;
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        const Floats x = Type::load(values + i);
        lanes = x > lanes ? x : lanes;
    }
    float of[kLanes];
    Type::store(lanes, of);
    for (int half = kLanes / 2; half > 0; half /= 2) {
        for (int l = 0; l < half; ++l) of[l] = of[l + half] > of[l] ? of[l + half] : of[l];
    }
    for (; i < n; ++i) of[0] = values[i] > of[0] ? values[i] : of[0];
    return of[0];
}

// Adds the logits `values` [n] to a row. Past n, `values` holds -inf up to whole lanes.
template <typename Type>
ESPER_INLINE void add_block(RowSums<float>& row, const float* values, int64_t n, bool smooth) {
    using Floats = typename Type::Floats;
    constexpr int64_t kLanes = Type::kLanes;
    const int64_t padded = (n + kLanes - 1) / kLanes * kLanes;
    RowSums<float> block = empty_row<float>();
    block.max = largest<Type>(values, n);
    if (block.max == -INFINITY) {  // nothing to sum but NaN
        for (int64_t i = 0; i < n; ++i) block.sum += std::isnan(values[i]) ? values[i] : 0.0f;
    } else {
        Floats sums[4] = {};
        int64_t i = 0;
        for (; i + 4 * kLanes <= padded; i += 4 * kLanes) {
            for (int k = 0; k < 4; ++k) sums[k] += Type::exp_negative(Type::load(values + i + k * kLanes) - block.max);
        }
        for (; i < padded; i += kLanes) sums[0] += Type::exp_negative(Type::load(values + i) - block.max);
        float sum_of[kLanes];
        Type::store((sums[0] + sums[1]) + (sums[2] + sums[3]), sum_of);
        for (int half = kLanes / 2; half > 0; half /= 2) {
            for (int l = 0; l < half; ++l) sum_of[l] += sum_of[l + half];
        }
        block.sum = sum_of[0];
    }
    if (smooth && block.max == -INFINITY) {
        block.total = -INFINITY;
    } else if (smooth) {
        const int64_t whole = n / kLanes * kLanes;
        Floats sums = {};
        // Differences, which are small even if all logits are large.
        for (int64_t i = 0; i < whole; i += kLanes) sums += Type::load(values + i) - block.max;
        for (int l = 0; l < kLanes; ++l) block.total += static_cast<double>(sums[l]);
        block.total += static_cast<double>(whole) * static_cast<double>(block.max);
        for (int64_t i = whole; i < n; ++i) block.total += static_cast<double>(values[i]);
    }
    merge(row, block);
}

template <typename Type>
ESPER_INLINE void wide_row(const Problem& problem, const RowOutputs<float>& out, int64_t r, Totals& totals) {
    const auto* logits = static_cast<const typename Type::Storage*>(problem.logits) + r * problem.classes;
    const bool counted = problem.targets[r] != problem.ignore_index;
    const auto target = static_cast<int32_t>(counted ? problem.targets[r] : 0);
    float values[kBlock];
    read_many<Type>(logits + target, 1, 0.0f, values);
    const float target_logit = values[0];
    RowSums<float> row = empty_row<float>();
    float before = -INFINITY;
    for (int64_t start = 0; start < problem.classes; start += kBlock) {
        const int64_t n = std::min(kBlock, problem.classes - start);
        const float* block = values;
        if (std::is_same_v<typename Type::Storage, float> && n == kBlock) {
            block = reinterpret_cast<const float*>(logits + start);
        } else {
            read_many<Type>(logits + start, n, -INFINITY, values);
        }
        const float max = row.max;
        add_block<Type>(row, block, n, problem.smoothing != 0);
        if (target >= start + n) {
            before = row.max;
        } else if (target >= start) {
            before = std::max(max, largest<Type>(block, target - start));
        }
    }
    const float log_sum_of = log_sum(row);
    const float loss = row_loss(row, log_sum_of, target_logit, problem.classes, problem.smoothing);
    const bool right = is_right<Type>(logits, problem.classes, target, target_logit, row.max, before, log_sum_of);
    write_row(out, totals, r, counted, row.max, log_sum_of, loss, right);
}

template <typename Type>
ESPER_INLINE void forward_tile(const Problem& problem, const RowOutputs<float>& out, int64_t first, int64_t rows,
                               Totals& totals) {
    if (problem.classes <= kNarrow) {
        for (int64_t r = 0; r < rows; r += Type::kLanes) {
            narrow_tile<Type>(problem, out, first + r, std::min<int64_t>(Type::kLanes, rows - r), totals);
        }
    } else {
        for (int64_t r = first; r < first + rows; ++r) wide_row<Type>(problem, out, r, totals);
    }
}

// --- backward -----------------------------------------------------------------------------------------------------

// Gradients of columns start..start+n of rows first..first+rows. All columns if there are several rows, and max kBlock
// logits in total.
template <typename Type>
ESPER_INLINE void backward_chunk(const Problem& problem, const float* normaliser, const GradientScale<float>& scale,
                                 int64_t first, int64_t rows, int64_t start, int64_t n,
                                 typename Type::Storage* gradient) {
    float values[kBlock + Type::kLanes];
    const int64_t offset = first * problem.classes + start;
    read_many<Type>(static_cast<const typename Type::Storage*>(problem.logits) + offset, rows * n, 0.0f, values);
    for (int64_t r = 0; r < rows; ++r) {
        const float max = normaliser[2 * (first + r)];
        const float log_sum_of = normaliser[2 * (first + r) + 1];
        for (int64_t c = 0; c < n; ++c) values[r * n + c] = (values[r * n + c] - max) - log_sum_of;
    }
    for (int64_t i = 0; i < rows * n; i += Type::kLanes) {
        Type::store((Type::exp_negative(Type::load(values + i)) - scale.uniform) * scale.scale, values + i);
    }
    for (int64_t r = 0; r < rows; ++r) {
        const int64_t target = problem.targets[first + r];
        if (target == problem.ignore_index) {
            for (int64_t c = 0; c < n; ++c) values[r * n + c] = 0.0f;
        } else if (target >= start && target < start + n) {
            values[r * n + target - start] -= scale.target * scale.scale;
        }
    }
    write_many<Type>(values, rows * n, gradient + offset);
}

template <typename Type>
ESPER_INLINE void backward_tile(const Problem& problem, const float* normaliser, const GradientScale<float>& scale,
                                int64_t first, int64_t rows, void* result) {
    auto* gradient = static_cast<typename Type::Storage*>(result);
    if (problem.classes <= kBlock) {
        const int64_t together = kBlock / problem.classes;
        for (int64_t r = 0; r < rows; r += together) {
            backward_chunk<Type>(problem, normaliser, scale, first + r, std::min(together, rows - r), 0,
                                 problem.classes, gradient);
        }
        return;
    }
    for (int64_t r = first; r < first + rows; ++r) {
        for (int64_t start = 0; start < problem.classes; start += kBlock) {
            backward_chunk<Type>(problem, normaliser, scale, r, 1, start, std::min(kBlock, problem.classes - start),
                                 gradient);
        }
    }
}

// --- entry points -------------------------------------------------------------------------------------------------

// Forward over one tile, rows `first` to `first + rows`; their statistics are added to `totals`.
ESPER_BY_WIDTH(
    void forward_rows(const Problem& problem, const RowOutputs<float>& out, int64_t first, int64_t rows,
                      Totals& totals),
    switch (problem.dtype) {
        case ScalarType::Float:
            return forward_tile<Float32<kBytes>>(problem, out, first, rows, totals);
        case ScalarType::BFloat16:
            return forward_tile<BFloat16<kBytes>>(problem, out, first, rows, totals);
        default:
            return forward_tile<Float16<kBytes>>(problem, out, first, rows, totals);
    })

// Backward over the same rows, into `gradient` of all rows.
ESPER_BY_WIDTH(
    void backward_rows(const Problem& problem, const float* normaliser, const GradientScale<float>& scale,
                       int64_t first, int64_t rows, void* gradient),
    switch (problem.dtype) {
        case ScalarType::Float:
            return backward_tile<Float32<kBytes>>(problem, normaliser, scale, first, rows, gradient);
        case ScalarType::BFloat16:
            return backward_tile<BFloat16<kBytes>>(problem, normaliser, scale, first, rows, gradient);
        default:
            return backward_tile<Float16<kBytes>>(problem, normaliser, scale, first, rows, gradient);
    })

}  // namespace
}  // namespace esper::cross_entropy
