// The loss that a task minimises and the score that it is measured by, from the outputs of a network.
//
// Cross-entropy with accuracy is that of csrc/cpu/cross_entropy.cpp. The others are functions of an output and its
// target, of which the mean over the outputs of a sample counts: esper/data/objective.py has them in PyTorch.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cmath>
#include <cstring>
#include <optional>
#include <vector>

#include "../cpu/step.h"
#include "../tensors.h"

namespace esper::tape {

// Their order is that of esper/ops/tape.py.
enum Loss : int64_t { kCrossEntropy = 0, kSquaredError, kBinaryCrossEntropy, kLossCount };
enum Score : int64_t { kAccuracy = 0, kExplained, kLabels, kScoreCount };

// max(x, 0) - x y + log(1 + exp(-|x|)), the negative logarithm of the probability of a label y from 0 to 1.
template <typename Real>
Real binary_loss(Real x, Real y) {
    return (1 - y) * x - (std::min(x, Real{}) - std::log1p(std::exp(-std::abs(x))));
}
template <typename Real>
Real binary_gradient(Real x, Real y) {
    const Real e = std::exp(-std::abs(x));
    return (x >= 0 ? Real{1} : e) / (1 + e) - y;
}

class Objective {
 public:
    // `variance` [D] is that of the targets of each output, for the score `kExplained`.
    Objective(int64_t loss, int64_t score, const std::optional<torch::stable::Tensor>& variance, double smoothing,
              bool is_double)
        : loss_(loss), score_(score), variance_(variance), smoothing_(smoothing), is_double_(is_double) {
        check(loss >= 0 && loss < kLossCount && score >= 0 && score < kScoreCount, "tape: there is no such objective");
        check((loss == kCrossEntropy) == (score == kAccuracy), "tape: cross-entropy and accuracy go together");
        check((score == kExplained) == variance.has_value(), "tape: the variance of targets is for one score");
        if (variance) check_numbers(*variance, "the variance of the targets");
    }

    bool has_classes() const { return loss_ == kCrossEntropy; }
    int32_t score_dtype() const { return has_classes() ? aoti_torch_dtype_uint8() : aoti_torch_dtype_float32(); }
    size_t score_bytes() const { return has_classes() ? sizeof(uint8_t) : sizeof(float); }

    // Targets of samples: int64 [N] for classes, else numbers [N, ...] in the dtype of the network.
    void check_targets(const torch::stable::Tensor& y, int64_t samples, int64_t outputs) const {
        check(y.dim() > 0 && y.size(0) == samples, "tape: there are not as many targets as samples");
        if (has_classes()) {
            check(y.dim() == 1 && y.is_contiguous() && dtype_code(y.get()) == aoti_torch_dtype_int64() &&
                      device_of(y).type == aoti_torch_device_type_cpu(),
                  "tape: the targets must be int64 [N], contiguous, on the CPU");
            return;
        }
        check_numbers(y, "the targets");
        check(y.numel() == samples * outputs, "tape: targets of shape ", shape_of(y), " do not fit ", outputs,
              " outputs a sample");
        check(!variance_ || variance_->numel() == outputs, "tape: the variance has a wrong size");
    }
    size_t target_bytes(int64_t outputs) const {
        if (has_classes()) return sizeof(int64_t);
        return static_cast<size_t>(outputs) * (is_double_ ? sizeof(double) : sizeof(float));
    }

    // Measures outputs [rows, D]: adds the sums to `sums` [kFieldCount], writes the score of each row to `scores` and
    // the gradient of the mean loss to `gradient` [rows, D]; each may be null.
    void measure(const void* outputs, const void* targets, int64_t rows, int64_t width, double* sums, void* scores,
                 void* gradient) const {
        if (has_classes()) {
            const cross_entropy::Rows problem{
                outputs, static_cast<const int64_t*>(targets), rows, width, rows, 1, -100, smoothing_};
            return cross_entropy::measure(problem, is_double_, sums, static_cast<uint8_t*>(scores), gradient);
        }
        if (is_double_) return measure_as<double>(outputs, targets, rows, width, sums, scores, gradient);
        measure_as<float>(outputs, targets, rows, width, sums, scores, gradient);
    }

 private:
    void check_numbers(const torch::stable::Tensor& tensor, const char* what) const {
        check(tensor.is_contiguous() && dtype_of(tensor.get()) == (is_double_ ? Dtype::kFloat64 : Dtype::kFloat32) &&
                  device_of(tensor).type == aoti_torch_device_type_cpu(),
              "tape: ", what, " must be contiguous, on the CPU, in the dtype of the network");
    }

    template <typename Real>
    void measure_as(const void* outputs, const void* targets, int64_t rows, int64_t width, double* sums, void* scores,
                    void* gradient) const {
        const auto* x = static_cast<const Real*>(outputs);
        const auto* y = static_cast<const Real*>(targets);
        const Real* variance = variance_ ? static_cast<const Real*>(variance_->const_data_ptr()) : nullptr;
        auto* slopes = static_cast<Real*>(gradient);
        const Real share = Real{1} / static_cast<Real>(rows * width);
        cross_entropy::Totals totals{0, 0, 0, 0};
        for (int64_t r = 0; r < rows; ++r) {
            double loss = 0, score = 0;
            for (int64_t d = 0; d < width; ++d) {
                const Real output = x[r * width + d], target = y[r * width + d];
                const Real error = output - target;
                const bool squared = loss_ == kSquaredError;
                loss += static_cast<double>(squared ? error * error : binary_loss(output, target));
                if (variance != nullptr) {
                    score += static_cast<double>(1 - error * error / variance[d]);
                } else {
                    score += (output > 0) == (target > Real{0.5}) ? 1 : 0;
                }
                if (slopes == nullptr) continue;
                const Real slope = squared ? 2 * error : binary_gradient(output, target);
                slopes[r * width + d] = slope * share;
            }
            loss /= static_cast<double>(width);
            score /= static_cast<double>(width);
            if (score_ == kLabels) score = static_cast<double>(static_cast<float>(score));  // as PyTorch has it
            cross_entropy::add_row(totals, loss, false);
            totals.correct += score;
            if (scores != nullptr) static_cast<float*>(scores)[r] = static_cast<float>(score);
        }
        if (sums != nullptr) cross_entropy::accumulate(totals, sums);
    }

    int64_t loss_, score_;
    std::optional<torch::stable::Tensor> variance_;
    double smoothing_;
    bool is_double_;
};

// The targets of batches.
class Targets {
 public:
    Targets(torch::stable::Tensor y, size_t bytes) : y_(std::move(y)), bytes_(bytes) {}

    const void* from(int64_t sample) const {
        return static_cast<const char*>(y_.const_data_ptr()) + static_cast<size_t>(sample) * bytes_;
    }
    // Those of these samples, until the next call.
    const void* of(const int64_t* rows, int64_t count) {
        chosen_.resize((static_cast<size_t>(count) * bytes_ + sizeof(double) - 1) / sizeof(double));
        auto* to = reinterpret_cast<char*>(chosen_.data());
        for (int64_t n = 0; n < count; ++n) std::memcpy(to + static_cast<size_t>(n) * bytes_, from(rows[n]), bytes_);
        return chosen_.data();
    }

 private:
    torch::stable::Tensor y_;
    size_t bytes_;
    std::vector<double> chosen_;  // aligned for numbers of any kind
};

}  // namespace esper::tape
