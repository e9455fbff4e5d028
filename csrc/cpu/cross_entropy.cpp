// Cross-entropy on the CPU.
//
// Policy: logits are read once forward and once backward, converted to float32 lanes on the way. Few classes: as many
// rows at a time as a register has lanes, so that no row pays for reducing across lanes. Many classes: a row in blocks
// that stay in the nearest cache, each reduced to (largest, sum) and joined. The float32 kernels are compiled for each
// instruction set with lanes of its own width. float64 takes the plain path of cross_entropy.h, which is also the CUDA
// kernel's. Rows are independent and their sums are added tile by tile in order, so the result has the same bits for
// any number of threads.
#include <torch/csrc/stable/library.h>

#include <tuple>
#include <vector>

#include "cross_entropy_rows.h"
#include "parallel.h"
#include "step.h"

namespace esper::cross_entropy {
namespace {

constexpr int kParts = 4;  // parts of a float64 row, joined like the threads of the CUDA kernel

void forward_float64(const Problem& problem, const RowOutputs<double>& out, int64_t first, int64_t rows,
                     Totals& totals) {
    for (int64_t r = first; r < first + rows; ++r) {
        const double* logits = static_cast<const double*>(problem.logits) + r * problem.classes;
        const bool counted = problem.targets[r] != problem.ignore_index;
        const int64_t target = counted ? problem.targets[r] : 0;
        RowSums<double> parts[kParts];
        for (int p = 0; p < kParts; ++p) {
            parts[p] = empty_row<double>();
            for (int64_t c = p; c < problem.classes; c += kParts) {
                add_logit(parts[p], logits[c], logits[target], c < target, problem.smoothing != 0);
            }
        }
        for (int half = kParts / 2; half > 0; half /= 2) {
            for (int p = 0; p < half; ++p) merge(parts[p], parts[p + half]);
        }
        const double log_sum_of = log_sum(parts[0]);
        const double loss = row_loss(parts[0], log_sum_of, logits[target], problem.classes, problem.smoothing);
        write_row(out, totals, r, counted, parts[0].max, log_sum_of, loss, !parts[0].beaten);
    }
}

void backward_float64(const Problem& problem, const double* normaliser, const GradientScale<double>& scale,
                      int64_t first, int64_t rows, double* gradient) {
    for (int64_t r = first; r < first + rows; ++r) {
        const double* logits = static_cast<const double*>(problem.logits) + r * problem.classes;
        double* row = gradient + r * problem.classes;
        const int64_t target = problem.targets[r];
        for (int64_t c = 0; c < problem.classes; ++c) {
            row[c] = target == problem.ignore_index
                         ? 0.0
                         : gradient_of(logits[c], normaliser[2 * r], normaliser[2 * r + 1], c == target, scale);
        }
    }
}

// --- launchers ----------------------------------------------------------------------------------------------------

void check_targets(const Problem& problem) {
    for (int64_t r = 0; r < problem.rows; ++r) {
        const int64_t target = problem.targets[r];
        check((target >= 0 && target < problem.classes) || target == problem.ignore_index, "cross_entropy: target ",
              target, " at position ", r, " is outside 0..", problem.classes - 1, " and is not ignore_index (",
              problem.ignore_index, ")");
    }
}

// Runs work(tile, first row, rows) for every tile of rows.
template <typename Work>
void for_tiles(const Problem& problem, const Work& work) {
    for_parts((problem.rows + kTile - 1) / kTile, problem.rows * problem.classes, [&](int64_t begin, int64_t end) {
        for (int64_t tile = begin; tile < end; ++tile) {
            work(tile, tile * kTile, std::min(kTile, problem.rows - tile * kTile));
        }
    });
}

template <typename Real, typename Tile>
Totals forward_tiles(const Problem& problem, uint8_t* correct, void* normaliser, const Tile& tile) {
    const RowOutputs<Real> out{correct, static_cast<Real*>(normaliser)};
    std::vector<Totals> totals(static_cast<size_t>((problem.rows + kTile - 1) / kTile), Totals{0, 0, 0, 0});
    for_tiles(problem, [&](int64_t index, int64_t first, int64_t rows) {
        tile(problem, out, first, rows, totals[static_cast<size_t>(index)]);
    });
    Totals all{0, 0, 0, 0};
    for (const Totals& part : totals) add(all, part);
    return all;
}

// All rows; `correct` and `normaliser` may be null.
Totals forward(const Problem& problem, uint8_t* correct, void* normaliser) {
    check_targets(problem);
    if (problem.is_double()) return forward_tiles<double>(problem, correct, normaliser, forward_float64);
    return forward_tiles<float>(problem, correct, normaliser, [](auto&&... arguments) { forward_rows(arguments...); });
}

std::tuple<Tensor, Tensor, Tensor, Tensor> cross_entropy(const Tensor& logits, const Tensor& targets,
                                                         int64_t ignore_index, double label_smoothing) {
    const Problem problem = read_problem(logits, targets, ignore_index, label_smoothing);
    Outputs out = make_outputs(problem);
    const Totals totals =
        forward(problem, static_cast<uint8_t*>(out.correct.mutable_data_ptr()), out.normaliser.mutable_data_ptr());
    auto* stats = static_cast<double*>(out.stats.mutable_data_ptr());
    std::fill_n(stats, static_cast<size_t>(kFieldCount), 0.0);
    accumulate(totals, stats);
    const double loss = mean_loss(totals);
    if (problem.is_double()) {
        *static_cast<double*>(out.loss.mutable_data_ptr()) = loss;
    } else {
        *static_cast<float*>(out.loss.mutable_data_ptr()) = static_cast<float>(loss);
    }
    return {out.loss, out.correct, out.stats, out.normaliser};
}

// Writes the gradient of grad_loss times the mean loss of `count` rows, whose normaliser [N, 2] is given.
void backward(const Problem& problem, double grad_loss, double count, const void* normaliser, void* gradient) {
    if (problem.is_double()) {
        const auto scale = gradient_scale<double>(grad_loss, count, problem.classes, problem.smoothing);
        for_tiles(problem, [&](int64_t, int64_t first, int64_t rows) {
            backward_float64(problem, static_cast<const double*>(normaliser), scale, first, rows,
                             static_cast<double*>(gradient));
        });
        return;
    }
    const auto scale = gradient_scale<float>(grad_loss, count, problem.classes, problem.smoothing);
    const auto* pairs = static_cast<const float*>(normaliser);
    for_tiles(problem, [&](int64_t, int64_t first, int64_t rows) {
        backward_rows(problem, pairs, scale, first, rows, gradient);
    });
}

Tensor cross_entropy_backward(const Tensor& grad_loss, const Tensor& logits, const Tensor& targets,
                              const Tensor& normaliser, const Tensor& stats, int64_t ignore_index,
                              double label_smoothing) {
    const Problem problem = read_problem(logits, targets, ignore_index, label_smoothing);
    const Saved saved = read_saved(problem, grad_loss, normaliser, stats);
    Tensor gradient = torch::stable::empty_like(problem.held_logits);
    const double factor = problem.is_double() ? *static_cast<const double*>(saved.grad_loss)
                                              : static_cast<double>(*static_cast<const float*>(saved.grad_loss));
    backward(problem, factor, saved.stats[kCount], saved.normaliser, gradient.mutable_data_ptr());
    return gradient;
}

void cross_entropy_into(const Tensor& logits, const Tensor& targets, const Tensor& block,
                        const std::optional<Tensor>& correct, int64_t env, int64_t configuration, int64_t first,
                        int64_t ignore_index, double label_smoothing) {
    const Problem problem = read_problem(logits, targets, ignore_index, label_smoothing);
    double* row = block_row(block, problem.held_logits.device(), env, configuration);
    const Results results = results_row(problem, correct, block, env, configuration, first);
    std::vector<uint8_t> tokens(results.counts != nullptr ? static_cast<size_t>(problem.rows) : 0);
    const Totals totals = forward(problem, results.counts != nullptr ? tokens.data() : results.correct, nullptr);
    accumulate(totals, row);
    if (results.counts == nullptr) return;
    for (int64_t b = 0; b < problem.samples; ++b) {
        int32_t count = 0;
        for (int64_t t = 0; t < problem.sequence; ++t) count += tokens[static_cast<size_t>(b * problem.sequence + t)];
        results.counts[b] = static_cast<int16_t>(count);
    }
}

}  // namespace

void measure(const Rows& rows, bool is_double, double* sums, uint8_t* correct, void* gradient) {
    Problem problem{};
    static_cast<Rows&>(problem) = rows;
    problem.dtype = is_double ? ScalarType::Double : ScalarType::Float;
    const size_t size = is_double ? sizeof(double) : sizeof(float);
    std::vector<char> normaliser(gradient == nullptr ? 0 : static_cast<size_t>(2 * rows.rows) * size);
    const Totals totals = forward(problem, correct, gradient == nullptr ? nullptr : normaliser.data());
    if (sums != nullptr) accumulate(totals, sums);
    if (gradient != nullptr) backward(problem, 1, totals.count, normaliser.data(), gradient);
}

namespace {

void accumulate_(const Tensor& block, int64_t env, int64_t configuration, const Tensor& stats) {
    const double* from = stats_row(stats);
    double* row = block_row(block, stats.device(), env, configuration);
    for (int field = 0; field < kFieldCount; ++field) row[field] += from[field];
}

}  // namespace
}  // namespace esper::cross_entropy

STABLE_TORCH_LIBRARY_IMPL(esper, CPU, m) {
    m.impl("cross_entropy", TORCH_BOX(&esper::cross_entropy::cross_entropy));
    m.impl("cross_entropy_forward", TORCH_BOX(&esper::cross_entropy::cross_entropy));
    m.impl("cross_entropy_backward", TORCH_BOX(&esper::cross_entropy::cross_entropy_backward));
    m.impl("cross_entropy_into", TORCH_BOX(&esper::cross_entropy::cross_entropy_into));
    m.impl("accumulate_", TORCH_BOX(&esper::cross_entropy::accumulate_));
}
