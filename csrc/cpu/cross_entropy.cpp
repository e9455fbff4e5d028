// Cross-entropy on the CPU.
//
// Policy: logits are read once forward and once backward, converted to float32 lanes on the way. Few classes: 16 rows
// at a time, a lane a row, so that no row pays for reducing across lanes. Many classes: a row in blocks that stay in
// the nearest cache, each reduced to (largest, sum) and joined. float64 takes the plain path of cross_entropy.h, which
// is also the CUDA kernel's. Rows are independent and their sums are added tile by tile in order, so the result has the
// same bits for any number of threads.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "../cross_entropy_arguments.h"
#include "wide_floats.h"

namespace esper::cross_entropy {
namespace {

using namespace esper::wide;

constexpr int64_t kTile = kLanes;                // rows of one task
constexpr int64_t kNarrow = 32;                  // most classes for a lane a row
constexpr int64_t kBlock = 1024;                 // logits of a row looked at together
constexpr int64_t kParallelLogits = 256 * 1024;  // below this, waking threads costs more than it saves
constexpr int64_t kLogitsPerTask = 64 * 1024;
constexpr int kParts = 4;  // parts of a float64 row, joined like the threads of the CUDA kernel

// What the rows of one call are written to; null where nobody asked. T is float or double.
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

// --- forward: few classes, a lane a row ---------------------------------------------------------------------------

template <typename Type>
ESPER_INLINE void narrow_tile(const Problem& problem, const RowOutputs<float>& out, int64_t first, int64_t rows,
                              Totals& totals) {
    const auto classes = static_cast<int32_t>(problem.classes);
    const auto* logits = static_cast<const typename Type::Storage*>(problem.logits) + first * classes;
    float row_major[kTile * kNarrow];   // [rows, C]
    float transposed[kNarrow * kTile];  // [C, rows]
    read_many<Type>(logits, rows * classes, 0.0f, row_major);
    for (int64_t i = rows * classes; i < kTile * classes; ++i) row_major[i] = 0.0f;  // rows past the end
    for (int64_t c = 0; c < classes; ++c) {
        for (int64_t l = 0; l < kTile; ++l) transposed[c * kTile + l] = row_major[l * classes + c];
    }

    int32_t target[kTile];
    float target_logit[kTile];
    for (int64_t l = 0; l < kTile; ++l) {
        const int64_t t = l < rows ? problem.targets[first + l] : problem.ignore_index;
        target[l] = t == problem.ignore_index ? -1 : static_cast<int32_t>(t);
        target_logit[l] = target[l] < 0 ? 0.0f : row_major[l * classes + target[l]];
    }
    Ints t;
    Floats xt;
    std::memcpy(&t, target, sizeof(t));
    load(target_logit, xt);

    Floats x;
    Floats max;
    load(transposed, max);
    Ints beaten = {};
    const Ints target_is_nan = xt != xt;
    for (int32_t c = 0; c < classes; ++c) {
        load(transposed + c * kTile, x);
        const Ints before = Ints{} + c < t;
        // As `beats`: NaN fails both comparisons; beside a NaN target only an earlier NaN counts.
        const Ints holds = before ? (target_is_nan ? x == x : x < xt) : (target_is_nan | (x <= xt));
        beaten |= ~holds;
        max = x > max ? x : max;
    }
    Floats sum = {};
    Floats total = {};
    Floats e;
    for (int32_t c = 0; c < classes; ++c) {
        load(transposed + c * kTile, x);
        const Floats below = x - max;  // NaN where the largest is infinite: such a row has no distribution
        exp_negative(below, e);
        sum += e;
        total += below;
    }
    Floats log_sums;
    log_positive(sum, log_sums);
    Floats loss = log_sums - (xt - max);
    if (problem.smoothing != 0) {
        const auto smoothing = static_cast<float>(problem.smoothing);
        loss = (1 - smoothing) * loss + smoothing * (log_sums - total / static_cast<float>(classes));
    }

    float max_of[kTile];
    float log_sum_of[kTile];
    float loss_of[kTile];
    int32_t beaten_of[kTile];
    store(max, max_of);
    store(log_sums, log_sum_of);
    store(loss, loss_of);
    std::memcpy(beaten_of, &beaten, sizeof(beaten));
    for (int64_t l = 0; l < rows; ++l) {
        write_row(out, totals, first + l, target[l] >= 0, max_of[l], log_sum_of[l], loss_of[l], beaten_of[l] == 0);
    }
}

// --- forward: many classes, a row in blocks -----------------------------------------------------------------------

// Adds the logits `values` [n] of columns start.. to a row. Past n, `values` holds -inf up to whole lanes.
ESPER_INLINE void add_block(RowSums<float>& row, const float* values, int64_t start, int64_t n, int32_t target,
                            float target_logit, bool smooth) {
    const int64_t padded = (n + kLanes - 1) / kLanes * kLanes;
    Floats x;
    Ints column;
    for (int32_t l = 0; l < kLanes; ++l) column[l] = static_cast<int32_t>(start) + l;
    Floats largest = Floats{} - INFINITY;
    Ints beaten = {};
    for (int64_t i = 0; i < padded; i += kLanes) {
        load(values + i, x);
        beaten |= ~(column < target ? x < target_logit : x <= target_logit);
        largest = x > largest ? x : largest;
        column += static_cast<int32_t>(kLanes);
    }
    float max_of[kLanes];
    store(largest, max_of);
    int32_t any = 0;
    for (int l = 0; l < kLanes; ++l) any |= beaten[l];

    RowSums<float> block = empty_row<float>();
    block.beaten = any != 0;
    for (int l = 0; l < kLanes; ++l) block.max = max_of[l] > block.max ? max_of[l] : block.max;
    if (block.max == -INFINITY) {  // nothing to sum but NaN, which `largest` passed over
        for (int64_t i = 0; i < n; ++i) block.sum += std::isnan(values[i]) ? values[i] : 0.0f;
    } else {
        Floats sums[4] = {};
        Floats e;
        int64_t i = 0;
        for (; i + 4 * kLanes <= padded; i += 4 * kLanes) {
            for (int k = 0; k < 4; ++k) {
                load(values + i + k * kLanes, x);
                exp_negative(x - block.max, e);
                sums[k] += e;
            }
        }
        for (; i < padded; i += kLanes) {
            load(values + i, x);
            exp_negative(x - block.max, e);
            sums[0] += e;
        }
        float sum_of[kLanes];
        store((sums[0] + sums[1]) + (sums[2] + sums[3]), sum_of);
        for (int half = kLanes / 2; half > 0; half /= 2) {
            for (int l = 0; l < half; ++l) sum_of[l] += sum_of[l + half];
        }
        block.sum = sum_of[0];
    }
    if (smooth) {
        const int64_t whole = n / kLanes * kLanes;
        Floats sums = {};
        for (int64_t i = 0; i < whole; i += kLanes) {
            load(values + i, x);
            sums += x;
        }
        for (int l = 0; l < kLanes; ++l) block.total += static_cast<double>(sums[l]);
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
    bool nan_before = false;  // only asked beside a NaN target
    for (int64_t start = 0; start < problem.classes; start += kBlock) {
        const int64_t n = std::min(kBlock, problem.classes - start);
        read_many<Type>(logits + start, n, -INFINITY, values);
        add_block(row, values, start, n, target, target_logit, problem.smoothing != 0);
        if (std::isnan(target_logit)) {
            for (int64_t i = 0; i < std::min(n, target - start); ++i) nan_before |= std::isnan(values[i]);
        }
    }
    if (std::isnan(target_logit)) row.beaten = nan_before;
    const float log_sum_of = log_sum(row);
    const float loss = row_loss(row, log_sum_of, target_logit, problem.classes, problem.smoothing);
    write_row(out, totals, r, counted, row.max, log_sum_of, loss, !row.beaten);
}

template <typename Type>
ESPER_INLINE void forward_tile(const Problem& problem, const RowOutputs<float>& out, int64_t first, int64_t rows,
                               Totals& totals) {
    if (problem.classes <= kNarrow) {
        narrow_tile<Type>(problem, out, first, rows, totals);
    } else {
        for (int64_t r = first; r < first + rows; ++r) wide_row<Type>(problem, out, r, totals);
    }
}

ESPER_CLONES void forward_float32(const Problem& problem, const RowOutputs<float>& out, int64_t first, int64_t rows,
                                  Totals& totals) {
    forward_tile<Float32>(problem, out, first, rows, totals);
}
ESPER_CLONES void forward_bfloat16(const Problem& problem, const RowOutputs<float>& out, int64_t first, int64_t rows,
                                   Totals& totals) {
    forward_tile<BFloat16>(problem, out, first, rows, totals);
}
ESPER_CLONES void forward_float16(const Problem& problem, const RowOutputs<float>& out, int64_t first, int64_t rows,
                                  Totals& totals) {
    forward_tile<Float16>(problem, out, first, rows, totals);
}

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

// --- backward -----------------------------------------------------------------------------------------------------

// Gradients of rows first.. that hold at most kBlock logits together, or of a part of one row: columns start..start+n.
template <typename Type>
ESPER_INLINE void backward_chunk(const Problem& problem, const float* normaliser, const GradientScale<float>& scale,
                                 int64_t first, int64_t rows, int64_t start, int64_t n,
                                 typename Type::Storage* gradient) {
    float values[kBlock + kLanes];
    const int64_t offset = first * problem.classes + start;
    read_many<Type>(static_cast<const typename Type::Storage*>(problem.logits) + offset, rows * n, 0.0f, values);
    for (int64_t r = 0; r < rows; ++r) {
        const float max = normaliser[2 * (first + r)];
        const float log_sum_of = normaliser[2 * (first + r) + 1];
        for (int64_t c = 0; c < n; ++c) values[r * n + c] = (values[r * n + c] - max) - log_sum_of;
    }
    Floats x;
    Floats e;
    for (int64_t i = 0; i < rows * n; i += kLanes) {
        load(values + i, x);
        exp_negative(x, e);
        store((e - scale.uniform) * scale.scale, values + i);
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
ESPER_INLINE void backward_rows(const Problem& problem, const float* normaliser, const GradientScale<float>& scale,
                                int64_t first, int64_t rows, typename Type::Storage* gradient) {
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

ESPER_CLONES void backward_float32(const Problem& problem, const float* normaliser, const GradientScale<float>& scale,
                                   int64_t first, int64_t rows, float* gradient) {
    backward_rows<Float32>(problem, normaliser, scale, first, rows, gradient);
}
ESPER_CLONES void backward_bfloat16(const Problem& problem, const float* normaliser, const GradientScale<float>& scale,
                                    int64_t first, int64_t rows, uint16_t* gradient) {
    backward_rows<BFloat16>(problem, normaliser, scale, first, rows, gradient);
}
ESPER_CLONES void backward_float16(const Problem& problem, const float* normaliser, const GradientScale<float>& scale,
                                   int64_t first, int64_t rows, uint16_t* gradient) {
    backward_rows<Float16>(problem, normaliser, scale, first, rows, gradient);
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

// Runs work(first row, rows) for every tile of rows, on many threads where that pays.
template <typename Work>
void for_tiles(const Problem& problem, const Work& work) {
    const int64_t tiles = (problem.rows + kTile - 1) / kTile;
    const auto run = [&](int64_t begin, int64_t end) {
        for (int64_t tile = begin; tile < end; ++tile) {
            work(tile, tile * kTile, std::min(kTile, problem.rows - tile * kTile));
        }
    };
    if (problem.rows * problem.classes >= kParallelLogits && torch::stable::get_num_threads() > 1) {
        torch::stable::parallel_for(0, tiles, std::max<int64_t>(1, kLogitsPerTask / (kTile * problem.classes)), run);
    } else {
        run(0, tiles);
    }
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
    switch (problem.dtype) {
        case ScalarType::Float:
            return forward_tiles<float>(problem, correct, normaliser, forward_float32);
        case ScalarType::BFloat16:
            return forward_tiles<float>(problem, correct, normaliser, forward_bfloat16);
        case ScalarType::Half:
            return forward_tiles<float>(problem, correct, normaliser, forward_float16);
        default:
            return forward_tiles<double>(problem, correct, normaliser, forward_float64);
    }
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

Tensor cross_entropy_backward(const Tensor& grad_loss, const Tensor& logits, const Tensor& targets,
                              const Tensor& normaliser, const Tensor& stats, int64_t ignore_index,
                              double label_smoothing) {
    const Problem problem = read_problem(logits, targets, ignore_index, label_smoothing);
    const Saved saved = read_saved(problem, grad_loss, normaliser, stats);
    Tensor gradient = torch::stable::empty_like(problem.held_logits);
    void* data = gradient.mutable_data_ptr();
    if (problem.is_double()) {
        const auto scale = gradient_scale<double>(*static_cast<const double*>(saved.grad_loss), saved.stats[kCount],
                                                  problem.classes, label_smoothing);
        for_tiles(problem, [&](int64_t, int64_t first, int64_t rows) {
            backward_float64(problem, static_cast<const double*>(saved.normaliser), scale, first, rows,
                             static_cast<double*>(data));
        });
        return gradient;
    }
    const auto scale = gradient_scale<float>(static_cast<double>(*static_cast<const float*>(saved.grad_loss)),
                                             saved.stats[kCount], problem.classes, label_smoothing);
    const auto* pairs = static_cast<const float*>(saved.normaliser);
    for_tiles(problem, [&](int64_t, int64_t first, int64_t rows) {
        if (problem.dtype == ScalarType::Float) {
            backward_float32(problem, pairs, scale, first, rows, static_cast<float*>(data));
        } else if (problem.dtype == ScalarType::BFloat16) {
            backward_bfloat16(problem, pairs, scale, first, rows, static_cast<uint16_t*>(data));
        } else {
            backward_float16(problem, pairs, scale, first, rows, static_cast<uint16_t*>(data));
        }
    });
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
    for (int64_t b = 0; b < problem.samples(); ++b) {
        int32_t count = 0;
        for (int64_t t = 0; t < problem.sequence; ++t) count += tokens[static_cast<size_t>(b * problem.sequence + t)];
        results.counts[b] = static_cast<int16_t>(count);
    }
}

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
