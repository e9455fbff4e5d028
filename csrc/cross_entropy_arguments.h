// Arguments of esper::cross_entropy and its companions, checked once for both devices.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <limits>
#include <optional>

#include "cross_entropy.h"
#include "tensors.h"

namespace esper::cross_entropy {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

struct Problem : Rows {
    bool language;  // logits came as [B, T, V]
    ScalarType dtype;

    // Owners of the memory above.
    Tensor held_logits;
    Tensor held_targets;

    bool is_double() const { return dtype == ScalarType::Double; }
    // The dtype of the loss and of the values saved for each row.
    ScalarType real() const { return is_double() ? ScalarType::Double : ScalarType::Float; }
};

inline Problem read_problem(const Tensor& logits, const Tensor& targets, int64_t ignore_index, double smoothing) {
    const ScalarType dtype = logits.scalar_type();
    check(dtype == ScalarType::Float || dtype == ScalarType::BFloat16 || dtype == ScalarType::Half ||
              dtype == ScalarType::Double,
          "cross_entropy: logits must be float32, bfloat16, float16 or float64");
    check(targets.scalar_type() == ScalarType::Long, "cross_entropy: targets must be int64");
    check(logits.device() == targets.device(), "cross_entropy: logits and targets are on different devices");
    const int64_t dims = logits.dim();
    check(dims == 2 || dims == 3, "cross_entropy: logits must be [B, C] or [B, T, V], got ", shape_of(logits));
    bool matches = targets.dim() == dims - 1;
    for (int64_t d = 0; matches && d < dims - 1; ++d) matches = targets.size(d) == logits.size(d);
    check(matches, "cross_entropy: targets ", shape_of(targets), " do not fit logits ", shape_of(logits),
          ": their shape must be that of the logits without its last dimension");
    const int64_t classes = logits.size(dims - 1);
    check(classes >= 1 && classes <= std::numeric_limits<int32_t>::max(),
          "cross_entropy: the last dimension of logits must have 1 to 2147483647 classes, got ", classes);
    check(smoothing >= 0 && smoothing <= 1, "cross_entropy: label_smoothing must be in [0, 1], got ", smoothing);

    Problem problem{};
    problem.held_logits = torch::stable::contiguous(logits);
    problem.held_targets = torch::stable::contiguous(targets);
    problem.logits = problem.held_logits.const_data_ptr();
    problem.targets = static_cast<const int64_t*>(problem.held_targets.const_data_ptr());
    problem.rows = targets.numel();
    problem.classes = classes;
    problem.language = dims == 3;
    problem.samples = logits.size(0);
    problem.sequence = dims == 3 ? logits.size(1) : 1;
    problem.dtype = dtype;
    problem.ignore_index = ignore_index;
    problem.smoothing = smoothing;
    return problem;
}

// Results of the functional form.
struct Outputs {
    Tensor loss;        // [] float32, or float64 for float64 logits
    Tensor correct;     // [N] in the shape of the targets, uint8
    Tensor stats;       // [kFieldCount] float64
    Tensor normaliser;  // [N, 2]: per row, largest logit and log of sum over exp(logit - largest); dtype of loss
};

inline Outputs make_outputs(const Problem& problem) {
    const Tensor& targets = problem.held_targets;
    return Outputs{torch::stable::new_empty(targets, {}, problem.real()),
                   torch::stable::new_empty(targets, targets.sizes(), ScalarType::Byte),
                   torch::stable::new_empty(targets, {kFieldCount}, ScalarType::Double),
                   torch::stable::new_empty(targets, {problem.rows, 2}, problem.real())};
}

// Saved tensors that backward reads besides the problem.
struct Saved {
    const void* grad_loss;   // one value, of the dtype of the loss
    const void* normaliser;  // [N, 2]
    const double* stats;     // [kFieldCount]
};

inline Saved read_saved(const Problem& problem, const Tensor& grad_loss, const Tensor& normaliser,
                        const Tensor& stats) {
    const auto device = problem.held_logits.device();
    check(grad_loss.numel() == 1 && grad_loss.scalar_type() == problem.real() && grad_loss.device() == device,
          "cross_entropy_backward: grad_loss must be one value of the dtype and on the device of the loss");
    check(normaliser.numel() == 2 * problem.rows && normaliser.scalar_type() == problem.real() &&
              normaliser.is_contiguous() && normaliser.device() == device,
          "cross_entropy_backward: normaliser must be what cross_entropy returned for these logits");
    check(stats.numel() == kFieldCount && stats.scalar_type() == ScalarType::Double && stats.is_contiguous() &&
              stats.device() == device,
          "cross_entropy_backward: stats must be what cross_entropy returned for these logits");
    return Saved{grad_loss.const_data_ptr(), normaliser.const_data_ptr(),
                 static_cast<const double*>(stats.const_data_ptr())};
}

// Row (env, configuration) of an accumulator block [E, K, kFieldCount].
inline double* block_row(const Tensor& block, const torch::stable::Device& device, int64_t env, int64_t configuration) {
    check(block.scalar_type() == ScalarType::Double && block.is_contiguous() && block.dim() == 3 &&
              block.size(2) == kFieldCount,
          "accumulators: block must be contiguous float64 [envs, configurations, ", static_cast<int>(kFieldCount),
          "], got ", shape_of(block));
    check(block.device() == device, "accumulators: block is on another device than the statistics");
    check(env >= 0 && env < block.size(0), "accumulators: env ", env, " is outside 0..", block.size(0) - 1);
    check(configuration >= 0 && configuration < block.size(1), "accumulators: configuration ", configuration,
          " is outside 0..", block.size(1) - 1);
    return static_cast<double*>(block.mutable_data_ptr()) + (env * block.size(1) + configuration) * kFieldCount;
}

// Destination of the per-sample results of one call: one byte a sample for classification, int16 a sequence for
// language. Null without a block of results.
struct Results {
    uint8_t* correct;
    int16_t* counts;
};

inline Results results_row(const Problem& problem, const std::optional<Tensor>& results, const Tensor& block,
                           int64_t env, int64_t configuration, int64_t first) {
    if (!results) return Results{nullptr, nullptr};
    const ScalarType expected = problem.language ? ScalarType::Short : ScalarType::Byte;
    check(results->scalar_type() == expected && results->is_contiguous() && results->dim() == 3,
          "cross_entropy_into: correct must be contiguous ",
          problem.language ? "int16 (counts per sequence, for logits [B, T, V])" : "uint8 (for logits [B, C])",
          " [envs, configurations, samples], got ", shape_of(*results));
    check(results->size(0) == block.size(0) && results->size(1) == block.size(1) && results->device() == block.device(),
          "cross_entropy_into: correct ", shape_of(*results), " does not match block ", shape_of(block));
    check(first >= 0 && first + problem.samples <= results->size(2), "cross_entropy_into: samples ", first, "..",
          first + problem.samples - 1, " are outside a row of ", results->size(2));
    check(problem.sequence <= std::numeric_limits<int16_t>::max(), "cross_entropy_into: a sequence of ",
          problem.sequence, " tokens is too long for an int16 count");
    const int64_t offset = (env * block.size(1) + configuration) * results->size(2) + first;
    void* data = results->mutable_data_ptr();
    return problem.language ? Results{nullptr, static_cast<int16_t*>(data) + offset}
                            : Results{static_cast<uint8_t*>(data) + offset, nullptr};
}

// The statistics of one earlier call.
inline const double* stats_row(const Tensor& stats) {
    check(stats.scalar_type() == ScalarType::Double && stats.is_contiguous() && stats.numel() == kFieldCount,
          "accumulate_: stats must be the contiguous float64 [", static_cast<int>(kFieldCount),
          "] that cross_entropy returned, got ", shape_of(stats));
    return static_cast<const double*>(stats.const_data_ptr());
}

}  // namespace esper::cross_entropy
