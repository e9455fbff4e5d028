// Convolutions, with or without groups.
//
// numbers: weight, bias or -1, kernel height and width, stride, padding and dilation in both dimensions, groups (1, or
// the number of channels).
#pragma once

#include <array>

#include "linear.h"
#include "machine.h"

namespace esper::tape {
namespace {

struct Convolution {
    explicit Convolution(const Instruction& i)
        : weight(i.number[0]),
          bias(i.number[1]),
          kernel{i.number[2], i.number[3]},
          stride{i.number[4], i.number[5]},
          padding{i.number[6], i.number[7]},
          dilation{i.number[8], i.number[9]},
          depthwise(i.number[10] > 1) {}
    int64_t weight, bias, kernel[2], stride[2], padding[2], dilation[2];
    bool depthwise;

    int64_t taps() const { return kernel[0] * kernel[1]; }
};

// What the positions along one axis of a plane read: position p reads p × stride + offset[t] for each tap t, where that
// lies inside of the other plane.
struct Axis {
    int64_t positions = 0;
    int64_t stride = 1;
    int64_t length = 0;  // of the plane that is read
    std::vector<int64_t> offset;
    std::vector<int64_t> tap;  // its number in the kernel

    // The taps of a position that lie inside. Offsets rise or fall, so these are a range.
    std::array<int64_t, 2> inside(int64_t position) const {
        const auto count = static_cast<int64_t>(offset.size());
        const auto reads = [&](int64_t t) {
            const int64_t at = position * stride + offset[static_cast<size_t>(t)];
            return at >= 0 && at < length;
        };
        int64_t first = 0;
        while (first < count && !reads(first)) ++first;
        int64_t last = first;
        while (last < count && reads(last)) ++last;
        return {first, last};
    }
};

// A number that a position reads: how far from the position's first, and the tap whose weight it has.
struct Reading {
    int64_t offset;
    int64_t tap;
};

// Positions of a row that read the same taps.
struct Run {
    int64_t column, columns;
    size_t first;  // of its readings
    int64_t readings;
};

// The readings of all positions of a plane, whose borders read less than the others.
struct Plan {
    std::vector<Reading> readings;
    std::vector<Run> runs;
    std::vector<size_t> rows;  // of each row, the number of the first run; of the end, too
    int64_t window;            // numbers of a plane that a row of positions reads

    // `row` is the length of a row that is read.
    Plan(const Axis& y, const Axis& x, int64_t row) : window(static_cast<int64_t>(y.offset.size()) * row) {
        for (int64_t p = 0; p < y.positions; ++p) {
            rows.push_back(runs.size());
            const auto [top, bottom] = y.inside(p);
            for (int64_t q = 0; q < x.positions;) {
                const auto columns = x.inside(q);
                int64_t end = q + 1;
                while (end < x.positions && x.inside(end) == columns) ++end;
                runs.push_back({q, end - q, readings.size(), (bottom - top) * (columns[1] - columns[0])});
                for (int64_t t = top; t < bottom; ++t) {
                    for (int64_t u = columns[0]; u < columns[1]; ++u) {
                        const auto a = static_cast<size_t>(t), b = static_cast<size_t>(u);
                        readings.push_back({y.offset[a] * row + x.offset[b] * kLanes, y.tap[a] + x.tap[b]});
                    }
                }
                q = end;
            }
        }
        rows.push_back(runs.size());
    }
};

// Where the sums of a plane are read and written.
struct Steps {
    int64_t read_plane, read_row, read_column;
    int64_t write_plane, write_row, write_column;
};

// Sums over `channels` planes and the readings of a run, for B outputs at X positions. `weights` lie by channel, tap
// and output.
template <typename Real, int B, int X>
ESPER_INLINE void sum_block(const Real* in, int64_t channels, const Reading* readings, int64_t count,
                            const Real* weights, int64_t taps, const Real* start, bool adds, const Steps& steps,
                            Real* out) {
    Lanes<Real> sums[B][X];
    ESPER_UNROLL for (int b = 0; b < B; ++b) {
        ESPER_UNROLL for (int x = 0; x < X; ++x) {
            sums[b][x] = adds ? load(out + b * steps.write_plane + x * steps.write_column)
                              : splat(start == nullptr ? Real{} : start[b]);
        }
    }
    for (int64_t c = 0; c < channels; ++c) {
        for (int64_t r = 0; r < count; ++r) {
            const Real* at = in + readings[r].offset;
            const Real* factors = weights + readings[r].tap * B;
            // Whichever are fewer stay in registers, the weights or what is read: with the sums they fill them.
            if constexpr (B <= X * kVectors<Real>) {
                Vector<Real> weight[B];
                ESPER_UNROLL for (int b = 0; b < B; ++b) weight[b] = splat_vector(factors[b]);
                ESPER_UNROLL for (int x = 0; x < X; ++x) {
                    ESPER_UNROLL for (int v = 0; v < kVectors<Real>; ++v) {
                        const Vector<Real> read = load_vector(at + x * steps.read_column + v * kWidth<Real>);
                        ESPER_UNROLL for (int b = 0; b < B; ++b) {
                            sums[b][x].part[v] = fma(read, weight[b], sums[b][x].part[v]);
                        }
                    }
                }
            } else {
                Lanes<Real> read[X];
                ESPER_UNROLL for (int x = 0; x < X; ++x) read[x] = load(at + x * steps.read_column);
                ESPER_UNROLL for (int b = 0; b < B; ++b) {
                    const Vector<Real> weight = splat_vector(factors[b]);
                    ESPER_UNROLL for (int x = 0; x < X; ++x) {
                        ESPER_UNROLL for (int v = 0; v < kVectors<Real>; ++v) {
                            sums[b][x].part[v] = fma(read[x].part[v], weight, sums[b][x].part[v]);
                        }
                    }
                }
            }
        }
        in += steps.read_plane;
        weights += taps * B;
    }
    ESPER_UNROLL for (int b = 0; b < B; ++b) {
        ESPER_UNROLL for (int x = 0; x < X; ++x) {
            store(sums[b][x], out + b * steps.write_plane + x * steps.write_column);
        }
    }
}

// Sums for B outputs at the positions of row number `row`; `in` and `out` begin there.
template <typename Real, int B>
void sum_row(const Real* in, int64_t channels, const Plan& plan, size_t row, const Real* weights, int64_t taps,
             const Real* start, bool adds, const Steps& steps, Real* out) {
    constexpr int X = std::max(1, kAccumulators / kVectors<Real> / B);
    for (size_t n = plan.rows[row]; n < plan.rows[row + 1]; ++n) {
        const Run& run = plan.runs[n];
        const Reading* readings = plan.readings.data() + run.first;
        int64_t x = run.column;
        const int64_t end = run.column + run.columns;
        for (; x + X <= end; x += X) {
            sum_block<Real, B, X>(in + x * steps.read_column, channels, readings, run.readings, weights, taps, start,
                                  adds, steps, out + x * steps.write_column);
        }
        for (; x < end; ++x) {
            sum_block<Real, B, 1>(in + x * steps.read_column, channels, readings, run.readings, weights, taps, start,
                                  adds, steps, out + x * steps.write_column);
        }
    }
}

// Outputs whose sums are computed together, of `left`.
template <typename Real>
int64_t outputs_together(int64_t left) {
    constexpr int64_t kMost = std::max(1, kAccumulators / kVectors<Real>);
    if (left == 4 && kMost >= 4) return 4;
    for (const int64_t block : {6, 3, 2}) {
        if (block <= kMost && block <= left) return block;
    }
    return 1;
}

// Numbers that stay in the fastest cache while blocks of outputs read them.
constexpr int64_t kNumbersOfWindow = 6144;

// Sums for all outputs of one group of samples; `weights` as `packed` has them. What all outputs read of a row is read
// once from memory: the channels of as many planes as fit into the fastest cache.
template <typename Real>
void sum_outputs(const Real* in, int64_t channels, const Plan& plan, const Real* weights, int64_t taps,
                 const Real* start, bool adds, const Steps& steps, Real* out, int64_t outputs) {
    const int64_t together = std::clamp<int64_t>(kNumbersOfWindow / std::max<int64_t>(plan.window, 1), 1, channels);
    for (size_t y = 0; y + 1 < plan.rows.size(); ++y) {
        for (int64_t c = 0; c < channels; c += together) {
            for (int64_t o = 0; o < outputs;) {
                const int64_t block = outputs_together<Real>(outputs - o);
                const auto sum = block == 6   ? sum_row<Real, 6>
                                 : block == 4 ? sum_row<Real, 4>
                                 : block == 3 ? sum_row<Real, 3>
                                 : block == 2 ? sum_row<Real, 2>
                                              : sum_row<Real, 1>;
                sum(in + c * steps.read_plane + static_cast<int64_t>(y) * steps.read_row,
                    std::min(together, channels - c), plan, y, weights + (o * channels + c * block) * taps, taps,
                    start == nullptr ? nullptr : start + o, adds || c > 0, steps,
                    out + o * steps.write_plane + static_cast<int64_t>(y) * steps.write_row);
                o += block;
            }
        }
    }
}

// Copies weights to the order in which sums read them: by block of outputs, channel, tap and output.
// `of_output`, `of_channel` are strides; a depthwise layer has blocks of one output.
template <typename Real>
const Real* packed(Machine<Real>& machine, const Convolution& layer, const Real* weights, const int64_t* strides,
                   int64_t outputs, int64_t channels, int64_t of_output, int64_t of_channel) {
    machine.packed.resize(static_cast<size_t>(outputs * channels * layer.taps()));
    Real* to = machine.packed.data();
    for (int64_t o = 0; o < outputs;) {
        const int64_t block = layer.depthwise ? 1 : outputs_together<Real>(outputs - o);
        for (int64_t c = 0; c < channels; ++c) {
            const Real* from = weights + o * of_output + c * of_channel;
            for (int64_t y = 0; y < layer.kernel[0]; ++y) {
                for (int64_t x = 0; x < layer.kernel[1]; ++x) {
                    const Real* tap = from + y * strides[2] + x * strides[3];
                    for (int64_t b = 0; b < block; ++b) *to++ = tap[b * of_output];
                }
            }
        }
        o += block;
    }
    return machine.packed.data();
}

Axis forward_axis(const Convolution& layer, int axis, int64_t in, int64_t out) {
    Axis result{out, layer.stride[axis], in, {}, {}};
    for (int64_t k = 0; k < layer.kernel[axis]; ++k) {
        result.offset.push_back(k * layer.dilation[axis] - layer.padding[axis]);
        result.tap.push_back(axis == 0 ? k * layer.kernel[1] : k);
    }
    return result;
}

template <typename Real>
void convolution_forward(Machine<Real>& machine, const Instruction& instruction) {
    const Convolution layer(instruction);
    const Value<Real>& in = machine.value(instruction.input);
    const Value<Real>& out = machine.value(instruction.output);
    const int64_t* strides = machine.tensors[static_cast<size_t>(layer.weight)].strides;
    const int64_t channels = layer.depthwise ? 1 : in.channels;
    const int64_t outputs = layer.depthwise ? 1 : out.channels;  // that read the same channels
    const Real* weights =
        packed(machine, layer, machine.data(layer.weight), strides, out.channels, channels, strides[0], strides[1]);
    const Real* bias = layer.bias < 0 ? nullptr : machine.data(layer.bias);
    const Plan plan(forward_axis(layer, 0, in.height, out.height), forward_axis(layer, 1, in.width, out.width),
                    in.row());
    const Steps steps{in.plane(), layer.stride[0] * in.row(), layer.stride[1] * kLanes, out.plane(), out.row(), kLanes};
    for (int64_t g = 0; g < machine.groups; ++g) {
        for (int64_t c = 0; c < out.channels; c += outputs) {
            sum_outputs<Real>(in.data + in.at(g, layer.depthwise ? c : 0), channels, plan,
                              weights + c * channels * layer.taps(), layer.taps(), bias == nullptr ? nullptr : bias + c,
                              false, steps, out.data + out.at(g, c), outputs);
        }
    }
}

// The positions of the input with remainder `first` along an axis, which are read by the same taps: the position p of
// the input is read by the output at (p + padding - tap × dilation) / stride.
Axis backward_axis(const Convolution& layer, int axis, int64_t first, int64_t in, int64_t out) {
    const int64_t stride = layer.stride[axis];
    Axis result{(in - first + stride - 1) / stride, 1, out, {}, {}};
    for (int64_t k = 0; k < layer.kernel[axis]; ++k) {
        const int64_t offset = first + layer.padding[axis] - k * layer.dilation[axis];
        if (offset % stride != 0) continue;
        result.offset.push_back(offset / stride);
        result.tap.push_back(axis == 0 ? k * layer.kernel[1] : k);
    }
    return result;
}

// The gradient of the input is a convolution of that of the output.
template <typename Real>
void convolution_input_gradient(Machine<Real>& machine, const Convolution& layer, Value<Real>& in,
                                const Value<Real>& out) {
    const int64_t* strides = machine.tensors[static_cast<size_t>(layer.weight)].strides;
    const int64_t channels = layer.depthwise ? 1 : out.channels;
    const int64_t outputs = layer.depthwise ? 1 : in.channels;
    const int64_t of_input = layer.depthwise ? strides[0] : strides[1];
    const Real* weights =
        packed(machine, layer, machine.data(layer.weight), strides, in.channels, channels, of_input, strides[0]);
    const Steps steps{out.plane(), out.row(), kLanes, in.plane(), layer.stride[0] * in.row(), layer.stride[1] * kLanes};
    for (int64_t y = 0; y < std::min(layer.stride[0], in.height); ++y) {
        for (int64_t x = 0; x < std::min(layer.stride[1], in.width); ++x) {
            const Plan plan(backward_axis(layer, 0, y, in.height, out.height),
                            backward_axis(layer, 1, x, in.width, out.width), out.row());
            const int64_t first = y * in.row() + x * kLanes;
            for (int64_t g = 0; g < machine.groups; ++g) {
                for (int64_t c = 0; c < in.channels; c += outputs) {
                    sum_outputs<Real>(out.gradient + out.at(g, layer.depthwise ? c : 0), channels, plan,
                                      weights + c * channels * layer.taps(), layer.taps(), nullptr, in.gathered, steps,
                                      in.gradient + in.at(g, c) + first, outputs);
                }
            }
        }
    }
    in.gathered = true;
}

// Part of a plane, of several groups: what a block of sums reads while that is in the fastest cache.
struct Tile {
    int64_t groups, rows, columns;
    int64_t left_group, left_plane, left_row, left_column;
    int64_t right_group, right_plane, right_row, right_column;
};

// Adds the products of O planes on the left and I on the right to sums [O × I][16].
template <typename Real, int O, int I>
void product_block(const Real* left, const Real* right, const Tile& tile, Real* sums) {
    // A block of few sums takes all vectors of the lanes at once: sums that wait for each other would be slower.
    constexpr int V = O * I * kVectors<Real> <= kAccumulators ? kVectors<Real> : 1;
    for (int first = 0; first < kLanes; first += V * kWidth<Real>) {
        Vector<Real> sum[O][I][V];
        ESPER_UNROLL for (int o = 0; o < O; ++o) {
            ESPER_UNROLL for (int i = 0; i < I; ++i) {
                ESPER_UNROLL for (int v = 0; v < V; ++v) {
                    sum[o][i][v] = load_vector(sums + (o * I + i) * kLanes + first + v * kWidth<Real>);
                }
            }
        }
        for (int64_t g = 0; g < tile.groups; ++g) {
            for (int64_t y = 0; y < tile.rows; ++y) {
                const Real* a = left + g * tile.left_group + y * tile.left_row + first;
                const Real* b = right + g * tile.right_group + y * tile.right_row + first;
                for (int64_t x = 0; x < tile.columns; ++x) {
                    ESPER_UNROLL for (int v = 0; v < V; ++v) {
                        Vector<Real> h[I];
                        ESPER_UNROLL for (int i = 0; i < I; ++i) {
                            h[i] = load_vector(b + i * tile.right_plane + v * kWidth<Real>);
                        }
                        ESPER_UNROLL for (int o = 0; o < O; ++o) {
                            const Vector<Real> d = load_vector(a + o * tile.left_plane + v * kWidth<Real>);
                            ESPER_UNROLL for (int i = 0; i < I; ++i) sum[o][i][v] = fma(d, h[i], sum[o][i][v]);
                        }
                    }
                    a += tile.left_column;
                    b += tile.right_column;
                }
            }
        }
        ESPER_UNROLL for (int o = 0; o < O; ++o) {
            ESPER_UNROLL for (int i = 0; i < I; ++i) {
                ESPER_UNROLL for (int v = 0; v < V; ++v) {
                    store_vector(sum[o][i][v], sums + (o * I + i) * kLanes + first + v * kWidth<Real>);
                }
            }
        }
    }
}

template <typename Real>
using ProductBlock = void (*)(const Real*, const Real*, const Tile&, Real*);

template <typename Real>
ProductBlock<Real> product_block_of(int64_t outputs, int64_t inputs) {
    static constexpr ProductBlock<Real> blocks[4][3] = {
        {product_block<Real, 1, 1>, product_block<Real, 1, 2>, product_block<Real, 1, 3>},
        {product_block<Real, 2, 1>, product_block<Real, 2, 2>, product_block<Real, 2, 3>},
        {product_block<Real, 3, 1>, product_block<Real, 3, 2>, product_block<Real, 3, 3>},
        {product_block<Real, 4, 1>, product_block<Real, 4, 2>, product_block<Real, 4, 3>},
    };
    return blocks[outputs - 1][inputs - 1];
}

// The outputs [first, last) along an axis for which a tap reads inside of the input.
struct Reached {
    int64_t first, last;
    int64_t offset;  // of what they read
    int64_t tap;
};

std::vector<Reached> reached_by_taps(const Axis& axis) {
    std::vector<Reached> result;
    for (size_t t = 0; t < axis.offset.size(); ++t) {
        Reached reached{0, axis.positions, axis.offset[t], axis.tap[t]};
        while (reached.first < reached.last && reached.first * axis.stride + reached.offset < 0) ++reached.first;
        while (reached.first < reached.last && (reached.last - 1) * axis.stride + reached.offset >= axis.length) {
            --reached.last;
        }
        result.push_back(reached);
    }
    return result;
}

// Positions of a tile, and those whose products are summed in the lanes' own precision before they join in float64.
constexpr int64_t kPositionsOfTile = 64;
constexpr int64_t kPositionsTogether = 256;

// The gradient of the weights: sums of products over positions and samples, for blocks of outputs and inputs.
template <typename Real>
void convolution_weight_gradient(Machine<Real>& machine, const Convolution& layer, const Value<Real>& in,
                                 const Value<Real>& out) {
    Real* result = machine.gradient(layer.weight);
    const int64_t* strides = machine.tensors[static_cast<size_t>(layer.weight)].strides;
    const std::vector<Reached> vertical = reached_by_taps(forward_axis(layer, 0, in.height, out.height));
    const std::vector<Reached> horizontal = reached_by_taps(forward_axis(layer, 1, in.width, out.width));
    const int64_t inputs = layer.depthwise ? 1 : in.channels;
    const int64_t tile_rows = std::clamp<int64_t>(kPositionsOfTile / out.width, 1, out.height);
    const int64_t tile_groups = std::max<int64_t>(1, kPositionsOfTile / out.positions());
    Tile tile{0,
              0,
              0,
              out.group(),
              out.plane(),
              out.row(),
              kLanes,
              in.group(),
              in.plane(),
              layer.stride[0] * in.row(),
              layer.stride[1] * kLanes};
    for (int64_t o = 0; o < out.channels;) {
        const int64_t left = out.channels - o;
        const int64_t rows = layer.depthwise ? 1 : left % 4 == 0 ? 4 : std::min<int64_t>(3, left);
        for (int64_t i = 0; i < inputs;) {
            const int64_t columns = std::min<int64_t>(3, inputs - i);
            const int64_t products = rows * columns;
            const ProductBlock<Real> add_products = product_block_of<Real>(rows, columns);
            const int64_t count = layer.taps() * products;
            machine.packed.assign(static_cast<size_t>(count * kLanes), Real{});
            machine.joined.assign(static_cast<size_t>(count), 0.0);
            Real* sums = machine.packed.data();
            int64_t summed = 0;  // positions in `sums`
            const auto join = [&] {
                for (int64_t k = 0; k < count; ++k) {
                    machine.joined[static_cast<size_t>(k)] += total(load(sums + k * kLanes));
                }
                summed = 0;
            };
            for (int64_t g = 0; g < machine.groups; g += tile_groups) {
                tile.groups = std::min(tile_groups, machine.groups - g);
                for (int64_t row = 0; row < out.height; row += tile_rows) {
                    if (summed >= kPositionsTogether) {
                        join();
                        std::fill_n(sums, count * kLanes, Real{});
                    }
                    for (const Reached& down : vertical) {
                        const int64_t first = std::max(down.first, row);
                        tile.rows = std::min(down.last, row + tile_rows) - first;
                        for (const Reached& right : horizontal) {
                            tile.columns = right.last - right.first;
                            if (tile.rows <= 0 || tile.columns <= 0) continue;
                            const int64_t y = first * layer.stride[0] + down.offset;
                            const int64_t x = right.first * layer.stride[1] + right.offset;
                            add_products(out.gradient + out.at(g, o) + first * out.row() + right.first * kLanes,
                                         in.data + in.at(g, layer.depthwise ? o : i) + y * in.row() + x * kLanes, tile,
                                         sums + (down.tap + right.tap) * products * kLanes);
                        }
                    }
                    summed += tile.groups * tile_rows * out.width;
                }
            }
            join();
            const double* joined = machine.joined.data();
            for (int64_t ky = 0; ky < layer.kernel[0]; ++ky) {
                for (int64_t kx = 0; kx < layer.kernel[1]; ++kx) {
                    Real* of_tap = result + o * strides[0] + i * strides[1] + ky * strides[2] + kx * strides[3];
                    for (int64_t a = 0; a < rows; ++a) {
                        for (int64_t b = 0; b < columns; ++b) {
                            of_tap[a * strides[0] + b * strides[1]] = static_cast<Real>(*joined++);
                        }
                    }
                }
            }
            i += columns;
        }
        o += rows;
    }
}

template <typename Real>
void convolution_backward(Machine<Real>& machine, const Instruction& instruction) {
    const Convolution layer(instruction);
    Value<Real>& in = machine.value(instruction.input);
    const Value<Real>& out = machine.value(instruction.output);
    if (machine.gradient(layer.weight) != nullptr) {
        convolution_weight_gradient(machine, layer, in, out);
    }
    if (layer.bias >= 0 && machine.gradient(layer.bias) != nullptr) {
        bias_gradient(machine, out, machine.gradient(layer.bias));
    }
    if (in.needed) convolution_input_gradient(machine, layer, in, out);
}

}  // namespace
}  // namespace esper::tape
