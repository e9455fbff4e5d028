// Normalisation, ReLU and 2x2 max-pool on the CPU, forward and backward.
//
// Policy: two passes over the input each way, one thread. Channels are cut into tiles of 32, 16, 8 and a rest, whose
// statistics and parameters stay in registers while the tile's pixels go by. Sums are float32 over a block of at most
// some hundred pixels and joined in float64. Passes that know windows go by pairs of rows; with and without the pool
// they visit the same places in the same order, so that a pool outside gives the same bits as the one inside.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <vector>

#include "../norm_relu_pool_arguments.h"
#include "lanes.h"

namespace esper::norm_relu_pool {
namespace {

constexpr int64_t kBlock = 256;  // pixels of a float32 sum, about

// Channels that are worked on together: V vectors from channel `first` on. The rest tile has one vector, not whole.
template <int V, bool Whole>
struct Tile {
    static constexpr int kVectors = V;
    static constexpr bool kWhole = Whole;
    static constexpr int kChains = 4 / V;  // sums kept apart, to hide the latency of additions
    int64_t first;
    int64_t lanes;

    // Per-channel floats of this tile; arrays of channels are padded to whole vectors.
    ESPER_INLINE void read(const float* channels, Floats (&to)[V]) const {
        for (int v = 0; v < V; ++v) to[v] = load_raw<Floats, true>(channels + first + v * kLanes, kLanes);
    }
    ESPER_INLINE void write(float* channels, const Floats (&from)[V]) const {
        for (int v = 0; v < V; ++v) store_raw<Floats, true>(channels + first + v * kLanes, from[v], kLanes);
    }
};

template <typename Body>
ESPER_INLINE void for_tiles(int64_t channels, const Body& body) {
    int64_t c = 0;
    for (; c + 32 <= channels; c += 32) body(Tile<4, true>{c, kLanes});
    for (; c + 16 <= channels; c += 16) body(Tile<2, true>{c, kLanes});
    for (; c + 8 <= channels; c += 8) body(Tile<1, true>{c, kLanes});
    if (c < channels) body(Tile<1, false>{c, channels - c});
}

#define ESPER_TILE_BODY [&](const auto& tile) __attribute__((always_inline))

int64_t padded(int64_t channels) {
    return (channels + kLanes - 1) / kLanes * kLanes;
}

// Per-channel values of a pass, each padded.
struct Channels {
    explicit Channels(int64_t channels)
        : pivot(padded(channels)),
          sum(padded(channels)),
          other(padded(channels)),
          mean(padded(channels)),
          scale(padded(channels)),
          shift(padded(channels)),
          slope(padded(channels)),
          offset(padded(channels)),
          total(padded(channels)),
          total_other(padded(channels)) {}
    std::vector<float> pivot, sum, other;                  // of one block
    std::vector<float> mean, scale, shift, slope, offset;  // see norm_relu_pool.h
    std::vector<double> total, total_other;                // of all blocks
};

enum class Pass { kStatistics, kForward, kSums, kInputGradient };

// One pass over one tensor; what it does not use is null.
struct Work {
    Pass pass;
    Shape shape;
    bool batch_statistics;
    const void* input;     // [N, H, W, C]
    const void* gradient;  // [N, OH, OW, C] of the output
    void* result;          // [N, OH, OW, C], or [N, H, W, C] for the input's gradient
    uint8_t* choice;       // [N, OH, OW, C]
    Channels* channels;
};

// Rows 2i and 2i + 1 of one image, and the row that they become.
struct RowPair {
    int64_t first;   // pixel where the first row starts
    int64_t pooled;  // output pixel where the pooled row starts
    bool both;       // false for the last row of an odd height
};

ESPER_INLINE int64_t row_pairs_per_image(const Shape& shape) {
    return (shape.height + 1) / 2;
}

ESPER_INLINE RowPair row_pair(const Shape& shape, int64_t index) {
    const int64_t image = index / row_pairs_per_image(shape);
    const int64_t pair = index % row_pairs_per_image(shape);
    return RowPair{(image * shape.height + 2 * pair) * shape.width,
                   (image * (shape.height / 2) + pair) * (shape.width / 2), 2 * pair + 1 < shape.height};
}

// --- statistics
// -------------------------------------------------------------------------------------------------------

// Sums of the distances to the pivot, and of their squares, over `count` pixels.
template <typename Type, typename Tile>
ESPER_INLINE void block_moments(const Work& work, const Tile& tile, int64_t begin, int64_t count) {
    constexpr int V = Tile::kVectors;
    constexpr int K = Tile::kChains;
    const int64_t stride = work.shape.channels;
    const auto* x = static_cast<const typename Type::Storage*>(work.input) + begin * stride + tile.first;
    Floats pivot[V];
    tile.read(work.channels->pivot.data(), pivot);
    Floats sum[K][V] = {};
    Floats sum_sq[K][V] = {};
    const auto add = [&](int k, int64_t pixel) __attribute__((always_inline)) {
        for (int v = 0; v < V; ++v) {
            const Floats d = Type::template load<Tile::kWhole>(x + pixel * stride + v * kLanes, tile.lanes) - pivot[v];
            sum[k][v] += d;
            sum_sq[k][v] += d * d;
        }
    };
    int64_t pixel = 0;
    for (; pixel + K <= count; pixel += K) {
        for (int k = 0; k < K; ++k) add(k, pixel + k);
    }
    for (; pixel < count; ++pixel) add(0, pixel);
    for (int k = 1; k < K; ++k) {
        for (int v = 0; v < V; ++v) {
            sum[0][v] += sum[k][v];
            sum_sq[0][v] += sum_sq[k][v];
        }
    }
    tile.write(work.channels->sum.data(), sum[0]);
    tile.write(work.channels->other.data(), sum_sq[0]);
}

// Mean and m2 of every channel into `total` and `total_other`. The pivot of a block is the mean so far: a block far
// from it adds as much to m2 as its own sums can lose.
template <typename Type>
ESPER_INLINE void statistics_pass(const Work& work) {
    Channels& channels = *work.channels;
    const int64_t C = work.shape.channels;
    const int64_t pixels = work.shape.pixels();
    for_tiles(
        C, ESPER_TILE_BODY {
            for (int v = 0; v < tile.kVectors; ++v) {
                const auto* x = static_cast<const typename Type::Storage*>(work.input) + tile.first + v * kLanes;
                store_raw<Floats, true>(channels.pivot.data() + tile.first + v * kLanes,
                                        Type::template load<tile.kWhole>(x, tile.lanes), kLanes);
            }
        });
    for (int64_t begin = 0; begin < pixels; begin += kBlock) {
        const int64_t count = std::min(kBlock, pixels - begin);
        for_tiles(C, ESPER_TILE_BODY { block_moments<Type>(work, tile, begin, count); });

        const auto n = static_cast<double>(count);
        const auto before = static_cast<double>(begin);
        const double part = n / (before + n);
        const double* const end = channels.total.data() + C;
        double* mean = channels.total.data();
        double* m2 = channels.total_other.data();
        float* pivot = channels.pivot.data();
        const float* sum = channels.sum.data();
        const float* sum_sq = channels.other.data();
        for (; mean < end; ++mean, ++m2, ++pivot, ++sum, ++sum_sq) {
            const Moments block = moments_of(n, *pivot, *sum, *sum_sq);
            const double distance = block.mean - *mean;
            *mean += distance * part;
            *m2 += block.m2 + distance * distance * before * part;
            *pivot = static_cast<float>(*mean);
        }
    }
}

// --- forward
// ----------------------------------------------------------------------------------------------------------

template <typename Type, bool kWhole>
ESPER_INLINE Floats activated(const typename Type::Storage* x, int64_t lanes, const Floats& scale,
                              const Floats& shift) {
    return Type::rounded(relu(normalised(Type::template load<kWhole>(x, lanes), scale, shift)));
}

// Pixels `begin` to `end`, without a pool.
template <typename Type, typename Tile>
ESPER_INLINE void forward_pixels(const Work& work, const Tile& tile, int64_t begin, int64_t end) {
    using Storage = typename Type::Storage;
    constexpr int V = Tile::kVectors;
    const int64_t stride = work.shape.channels;
    const auto* x = static_cast<const Storage*>(work.input) + begin * stride + tile.first;
    auto* y = static_cast<Storage*>(work.result) + begin * stride + tile.first;
    Floats scale[V];
    Floats shift[V];
    tile.read(work.channels->scale.data(), scale);
    tile.read(work.channels->shift.data(), shift);
    for (int64_t pixel = begin; pixel < end; ++pixel, x += stride, y += stride) {
        for (int v = 0; v < V; ++v) {
            const Floats value =
                relu(normalised(Type::template load<Tile::kWhole>(x + v * kLanes, tile.lanes), scale[v], shift[v]));
            Type::template store<Tile::kWhole>(y + v * kLanes, value, tile.lanes);
        }
    }
}

// One row of pooled outputs.
template <typename Type, typename Tile>
ESPER_INLINE void forward_pooled_row(const Work& work, const Tile& tile, const RowPair& rows) {
    using Storage = typename Type::Storage;
    constexpr int V = Tile::kVectors;
    constexpr bool kWhole = Tile::kWhole;
    const int64_t stride = work.shape.channels;
    const int64_t row = work.shape.width * stride;
    const auto* x = static_cast<const Storage*>(work.input) + rows.first * stride + tile.first;
    auto* y = static_cast<Storage*>(work.result) + rows.pooled * stride + tile.first;
    uint8_t* c = work.choice + rows.pooled * stride + tile.first;
    Floats scale[V];
    Floats shift[V];
    tile.read(work.channels->scale.data(), scale);
    tile.read(work.channels->shift.data(), shift);
    const int64_t windows = work.shape.width / 2;
    for (int64_t j = 0; j < windows; ++j, x += 2 * stride, y += stride, c += stride) {
        for (int v = 0; v < V; ++v) {
            const Storage* corner = x + v * kLanes;
            Floats best = activated<Type, kWhole>(corner, tile.lanes, scale[v], shift[v]);
            Ints choice{};
            choose(best, choice, activated<Type, kWhole>(corner + stride, tile.lanes, scale[v], shift[v]), 1);
            choose(best, choice, activated<Type, kWhole>(corner + row, tile.lanes, scale[v], shift[v]), 2);
            choose(best, choice, activated<Type, kWhole>(corner + row + stride, tile.lanes, scale[v], shift[v]), 3);
            Type::template store_rounded<kWhole>(y + v * kLanes, best, tile.lanes);
            store_raw<Bytes, kWhole>(c + v * kLanes, __builtin_convertvector(alive_choice(best, choice), Bytes),
                                     tile.lanes);
        }
    }
}

template <typename Type>
ESPER_INLINE void forward_pass(const Work& work) {
    const Shape& shape = work.shape;
    if (!shape.pool) {
        for (int64_t begin = 0; begin < shape.pixels(); begin += kBlock) {
            const int64_t end = std::min(begin + kBlock, shape.pixels());
            for_tiles(shape.channels, ESPER_TILE_BODY { forward_pixels<Type>(work, tile, begin, end); });
        }
        return;
    }
    for (int64_t p = 0; p < shape.batch * row_pairs_per_image(shape); ++p) {
        const RowPair rows = row_pair(shape, p);
        if (!rows.both) continue;
        for_tiles(shape.channels, ESPER_TILE_BODY { forward_pooled_row<Type>(work, tile, rows); });
    }
}

// --- backward
// ---------------------------------------------------------------------------------------------------------

// Sums over row pairs `begin` to `end` of g and g * (x - mean), g being the gradient behind the normalisation.
template <typename Type, bool kPool, typename Tile>
ESPER_INLINE void block_sums(const Work& work, const Tile& tile, int64_t begin, int64_t end) {
    using Storage = typename Type::Storage;
    constexpr int V = Tile::kVectors;
    constexpr int K = Tile::kChains;
    constexpr bool kWhole = Tile::kWhole;
    const int64_t stride = work.shape.channels;
    const int64_t width = work.shape.width;
    const int64_t row = width * stride;
    Floats mean[V];
    Floats scale[V];
    Floats shift[V];
    tile.read(work.channels->mean.data(), mean);
    tile.read(work.channels->scale.data(), scale);
    tile.read(work.channels->shift.data(), shift);
    Floats sum[K][V] = {};
    Floats dot[K][V] = {};
    for (int64_t p = begin; p < end; ++p) {
        const RowPair rows = row_pair(work.shape, p);
        const auto* x = static_cast<const Storage*>(work.input) + rows.first * stride + tile.first;
        // Window j adds to chain j % K. Places of a window that get no gradient add 0, which changes no bit.
        if constexpr (kPool) {
            if (!rows.both) continue;
            const auto* g = static_cast<const Storage*>(work.gradient) + rows.pooled * stride + tile.first;
            const uint8_t* c = work.choice + rows.pooled * stride + tile.first;
            const auto window = [&](int k, int64_t j) __attribute__((always_inline)) {
                for (int v = 0; v < V; ++v) {
                    const Storage* corner = x + 2 * j * stride + v * kLanes;
                    const Ints choice = __builtin_convertvector(
                        (load_raw<Bytes, kWhole>(c + j * stride + v * kLanes, tile.lanes)), Ints);
                    Floats taken = Type::template load<kWhole>(corner, tile.lanes);
                    taken = choice == 1 ? Type::template load<kWhole>(corner + stride, tile.lanes) : taken;
                    taken = choice == 2 ? Type::template load<kWhole>(corner + row, tile.lanes) : taken;
                    taken = choice == 3 ? Type::template load<kWhole>(corner + row + stride, tile.lanes) : taken;
                    const Floats output_gradient = Type::template load<kWhole>(g + j * stride + v * kLanes, tile.lanes);
                    const Floats gradient = choice == kDead ? Floats{} : output_gradient;
                    sum[k][v] += gradient;
                    dot[k][v] += gradient * (taken - mean[v]);
                }
            };
            int64_t j = 0;
            for (; j + K <= width / 2; j += K) {
                for (int k = 0; k < K; ++k) window(k, j + k);
            }
            for (int k = 0; j < width / 2; ++j, ++k) window(k, j);
        } else {
            const auto* g = static_cast<const Storage*>(work.gradient) + rows.first * stride + tile.first;
            const auto place = [&](int k, int64_t at) __attribute__((always_inline)) {
                for (int v = 0; v < V; ++v) {
                    const Floats value = Type::template load<kWhole>(x + at + v * kLanes, tile.lanes);
                    const Floats gradient = relu_gradient(Type::template load<kWhole>(g + at + v * kLanes, tile.lanes),
                                                          normalised(value, scale[v], shift[v]), Type::kRoundsToZero);
                    sum[k][v] += gradient;
                    dot[k][v] += gradient * (value - mean[v]);
                }
            };
            const auto window = [&](int k, int64_t j) __attribute__((always_inline)) {
                place(k, 2 * j * stride);
                place(k, (2 * j + 1) * stride);
                place(k, 2 * j * stride + row);
                place(k, (2 * j + 1) * stride + row);
            };
            int64_t j = 0;
            if (rows.both) {
                for (; j + K <= width / 2; j += K) {
                    for (int k = 0; k < K; ++k) window(k, j + k);
                }
                for (int k = 0; j < width / 2; ++j, ++k) window(k, j);
            }
            // Places without a window: what is left of both rows, or of the one.
            for (int64_t w = 2 * j; w < width; ++w) {
                place(0, w * stride);
                if (rows.both) place(0, w * stride + row);
            }
        }
    }
    for (int k = 1; k < K; ++k) {
        for (int v = 0; v < V; ++v) {
            sum[0][v] += sum[k][v];
            dot[0][v] += dot[k][v];
        }
    }
    tile.write(work.channels->sum.data(), sum[0]);
    tile.write(work.channels->other.data(), dot[0]);
}

template <typename Type>
ESPER_INLINE void sums_pass(const Work& work) {
    Channels& channels = *work.channels;
    const Shape& shape = work.shape;
    const int64_t pairs = shape.batch * row_pairs_per_image(shape);
    const int64_t step = std::max<int64_t>(1, kBlock / (2 * shape.width));
    for (int64_t begin = 0; begin < pairs; begin += step) {
        const int64_t end = std::min(begin + step, pairs);
        if (shape.pool) {
            for_tiles(shape.channels, ESPER_TILE_BODY { block_sums<Type, true>(work, tile, begin, end); });
        } else {
            for_tiles(shape.channels, ESPER_TILE_BODY { block_sums<Type, false>(work, tile, begin, end); });
        }
        for (int64_t c = 0; c < shape.channels; ++c) {
            const auto i = static_cast<size_t>(c);
            channels.total[i] += channels.sum[i];
            channels.total_other[i] += channels.other[i];
        }
    }
}

// The input's gradient over one pair of rows.
template <typename Type, bool kPool, bool kBatch, typename Tile>
ESPER_INLINE void gradient_rows(const Work& work, const Tile& tile, const RowPair& rows) {
    using Storage = typename Type::Storage;
    constexpr int V = Tile::kVectors;
    constexpr bool kWhole = Tile::kWhole;
    const int64_t stride = work.shape.channels;
    const int64_t width = work.shape.width;
    const int64_t row = width * stride;
    const auto* x = static_cast<const Storage*>(work.input) + rows.first * stride + tile.first;
    auto* dx = static_cast<Storage*>(work.result) + rows.first * stride + tile.first;
    Floats mean[V];
    Floats scale[V];
    Floats shift[V];
    Floats slope[V];
    Floats offset[V];
    tile.read(work.channels->mean.data(), mean);
    tile.read(work.channels->scale.data(), scale);
    tile.read(work.channels->shift.data(), shift);
    tile.read(work.channels->slope.data(), slope);
    tile.read(work.channels->offset.data(), offset);
    const auto write = [&](int v, int64_t at, const Floats& value,
                           const Floats& gradient) __attribute__((always_inline)) {
        const Floats result =
            kBatch ? input_gradient(gradient, value, mean[v], scale[v], slope[v], offset[v]) : gradient * scale[v];
        Type::template store<kWhole>(dx + at + v * kLanes, result, tile.lanes);
    };
    if constexpr (kPool) {
        const auto place = [&](int v, int64_t at, const Floats& gradient) __attribute__((always_inline)) {
            write(v, at, Type::template load<kWhole>(x + at + v * kLanes, tile.lanes), gradient);
        };
        int64_t j = 0;
        if (rows.both) {
            const auto* g = static_cast<const Storage*>(work.gradient) + rows.pooled * stride + tile.first;
            const uint8_t* c = work.choice + rows.pooled * stride + tile.first;
            for (; j < width / 2; ++j, g += stride, c += stride) {
                const int64_t at = 2 * j * stride;
                for (int v = 0; v < V; ++v) {
                    const Floats gradient = Type::template load<kWhole>(g + v * kLanes, tile.lanes);
                    const Ints choice =
                        __builtin_convertvector((load_raw<Bytes, kWhole>(c + v * kLanes, tile.lanes)), Ints);
                    place(v, at, routed(gradient, choice, 0));
                    place(v, at + stride, routed(gradient, choice, 1));
                    place(v, at + row, routed(gradient, choice, 2));
                    place(v, at + row + stride, routed(gradient, choice, 3));
                }
            }
        }
        for (int64_t w = 2 * j; w < width; ++w) {
            for (int v = 0; v < V; ++v) {
                place(v, w * stride, Floats{});
                if (rows.both) place(v, w * stride + row, Floats{});
            }
        }
    } else {
        const auto* g = static_cast<const Storage*>(work.gradient) + rows.first * stride + tile.first;
        const int64_t end = rows.both ? 2 * row : row;
        for (int64_t at = 0; at < end; at += stride) {
            for (int v = 0; v < V; ++v) {
                const Floats value = Type::template load<kWhole>(x + at + v * kLanes, tile.lanes);
                const Floats gradient = relu_gradient(Type::template load<kWhole>(g + at + v * kLanes, tile.lanes),
                                                      normalised(value, scale[v], shift[v]), Type::kRoundsToZero);
                write(v, at, value, gradient);
            }
        }
    }
}

template <typename Type, bool kPool, bool kBatch>
ESPER_INLINE void gradient_pass(const Work& work) {
    for (int64_t p = 0; p < work.shape.batch * row_pairs_per_image(work.shape); ++p) {
        const RowPair rows = row_pair(work.shape, p);
        for_tiles(work.shape.channels, ESPER_TILE_BODY { gradient_rows<Type, kPool, kBatch>(work, tile, rows); });
    }
}

// --- instruction sets and storage types
// -------------------------------------------------------------------------------

template <typename Type>
ESPER_INLINE void run(const Work& work) {
    switch (work.pass) {
        case Pass::kStatistics:
            return statistics_pass<Type>(work);
        case Pass::kForward:
            return forward_pass<Type>(work);
        case Pass::kSums:
            return sums_pass<Type>(work);
        case Pass::kInputGradient:
            break;
    }
    if (work.shape.pool) {
        if (work.batch_statistics) return gradient_pass<Type, true, true>(work);
        return gradient_pass<Type, true, false>(work);
    }
    if (work.batch_statistics) return gradient_pass<Type, false, true>(work);
    return gradient_pass<Type, false, false>(work);
}

ESPER_CLONES void run_float32(const Work& work) {
    run<Float32Lanes>(work);
}
ESPER_CLONES void run_bfloat16(const Work& work) {
    run<BFloat16Lanes>(work);
}

void run(Work& work, Pass pass, Dtype dtype) {
    work.pass = pass;
    if (dtype == Dtype::Float) {
        run_float32(work);
    } else {
        run_bfloat16(work);
    }
}

// --- operators
// --------------------------------------------------------------------------------------------------------

std::tuple<Tensor, Tensor, Tensor> forward(const Tensor& input, const Tensor& weight, const Tensor& bias,
                                           std::optional<Tensor> running_mean, std::optional<Tensor> running_var,
                                           double eps, bool pool) {
    const Shape shape = checked_input(input, pool);
    const Parameters parameters = checked_parameters(input, shape, weight, bias, running_mean, running_var, eps);
    Outputs outputs = make_outputs(input, shape);
    auto* statistics = static_cast<float*>(outputs.statistics.mutable_data_ptr());
    Channels channels(shape.channels);
    Work work{};
    work.shape = shape;
    work.input = input.const_data_ptr();
    work.result = outputs.output.mutable_data_ptr();
    work.choice = static_cast<uint8_t*>(outputs.choice.mutable_data_ptr());
    work.channels = &channels;

    const bool batch = parameters.running_mean == nullptr;
    const auto count = static_cast<double>(shape.pixels());
    if (batch && shape.elements() > 0) run(work, Pass::kStatistics, input.scalar_type());
    for (int64_t c = 0; c < shape.channels; ++c) {
        const auto i = static_cast<size_t>(c);
        const Statistics row =
            !batch ? running_statistics(parameters.running_mean[c], parameters.running_variance[c], parameters.eps)
                   : statistics_of(Moments{count, channels.total[i], channels.total_other[i]}, parameters.eps);
        statistics[kMean * shape.channels + c] = row.mean;
        statistics[kInvStd * shape.channels + c] = row.inv_std;
        statistics[kVariance * shape.channels + c] = row.variance;
        const Affine affine = affine_of(row.mean, row.inv_std, parameters.weight[c], parameters.bias[c]);
        channels.scale[i] = affine.scale;
        channels.shift[i] = affine.shift;
    }
    if (shape.elements() > 0) run(work, Pass::kForward, input.scalar_type());
    return {outputs.output, outputs.statistics, outputs.choice};
}

std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& grad_output, const Tensor& input, const Tensor& weight,
                                            const Tensor& bias, const Tensor& statistics, const Tensor& choice,
                                            bool batch_statistics, bool pool) {
    const Shape shape = checked_input(input, pool);
    check_backward(grad_output, input, shape, statistics, choice);
    const Device device = device_of(input);
    const float* weights = checked_channels(weight, "weight", shape, device);
    const float* biases = checked_channels(bias, "bias", shape, device);
    const auto* rows = static_cast<const float*>(statistics.const_data_ptr());
    Gradients gradients = make_gradients(input, shape);
    Channels channels(shape.channels);
    for (int64_t c = 0; c < shape.channels; ++c) {
        const auto i = static_cast<size_t>(c);
        const float mean = rows[kMean * shape.channels + c];
        const Affine affine = affine_of(mean, rows[kInvStd * shape.channels + c], weights[c], biases[c]);
        channels.mean[i] = mean;
        channels.scale[i] = affine.scale;
        channels.shift[i] = affine.shift;
    }
    Work work{};
    work.shape = shape;
    work.batch_statistics = batch_statistics;
    work.input = input.const_data_ptr();
    work.gradient = grad_output.const_data_ptr();
    work.result = gradients.input.mutable_data_ptr();
    work.choice = const_cast<uint8_t*>(static_cast<const uint8_t*>(choice.const_data_ptr()));  // only read
    work.channels = &channels;

    if (shape.elements() > 0) run(work, Pass::kSums, input.scalar_type());
    auto* grad_weight = static_cast<float*>(gradients.weight.mutable_data_ptr());
    auto* grad_bias = static_cast<float*>(gradients.bias.mutable_data_ptr());
    for (int64_t c = 0; c < shape.channels; ++c) {
        const auto i = static_cast<size_t>(c);
        const float inv_std = rows[kInvStd * shape.channels + c];
        grad_weight[c] = static_cast<float>(channels.total_other[i] * inv_std);
        grad_bias[c] = static_cast<float>(channels.total[i]);
        const Slope slope = slope_of(channels.total[i], channels.total_other[i], static_cast<double>(shape.pixels()),
                                     inv_std, channels.scale[i]);
        channels.slope[i] = slope.slope;
        channels.offset[i] = slope.offset;
    }
    if (shape.elements() > 0) run(work, Pass::kInputGradient, input.scalar_type());
    return {gradients.input, gradients.weight, gradients.bias};
}

void update(Tensor running_mean, Tensor running_var, Tensor num_batches_tracked, const Tensor& statistics,
            std::optional<double> momentum) {
    const Running running = checked_running(running_mean, running_var, num_batches_tracked, statistics, momentum);
    *running.count += 1;
    for (int64_t c = 0; c < running.channels; ++c) {
        running.mean[c] =
            updated(running.mean[c], running.rows[kMean * running.channels + c], running.momentum, *running.count);
        running.variance[c] = updated(running.variance[c], running.rows[kVariance * running.channels + c],
                                      running.momentum, *running.count);
    }
}

}  // namespace
}  // namespace esper::norm_relu_pool

STABLE_TORCH_LIBRARY_IMPL(esper, CPU, m) {
    m.impl("norm_relu_pool", TORCH_BOX(&esper::norm_relu_pool::forward));
    m.impl("norm_relu_pool_backward", TORCH_BOX(&esper::norm_relu_pool::backward));
    m.impl("norm_relu_pool_update_", TORCH_BOX(&esper::norm_relu_pool::update));
}
