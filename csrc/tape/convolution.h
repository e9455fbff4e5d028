// Convolutions, with or without groups, and linear layers, which are convolutions of one position.
//
// numbers: weight, bias or -1, kernel height and width, stride, padding and dilation in both dimensions, groups (1, or
// the number of channels).
#pragma once

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

    // The border that its input needs, and that of the gradient of its output, of length `out` along axis `a`.
    int64_t input_border() const { return std::max(padding[0], padding[1]); }
    int64_t gradient_border(const int64_t (&in)[2], const int64_t (&out)[2]) const {
        int64_t border = 0;
        for (int a = 0; a < 2; ++a) {
            const int64_t before = dilation[a] * (kernel[a] - 1) - padding[a];
            const int64_t last = (in[a] - 1 + padding[a]) / stride[a];
            border = std::max({border, (before + stride[a] - 1) / stride[a], last - (out[a] - 1)});
        }
        return border;
    }
};

// The positions of a pass over a plane: `rows` × `columns`, and how far apart they are where it reads and writes.
struct Positions {
    int64_t rows, columns;
    int64_t read_row, read_column;
    int64_t write_row, write_column;
};

// Sums over `channels` planes and `taps` offsets for B outputs at X positions, with their weights in the order in which
// they are read: out[b][x] = start + sum of weight × in.
template <typename Real, int B, int X>
ESPER_INLINE void sum_block(const Real* in, int64_t plane, int64_t channels, const int64_t* offsets, int64_t taps,
                            const Real* weights, const Real* start, bool adds, int64_t read_step, Real* out,
                            int64_t out_plane, int64_t write_step) {
    Lanes<Real> sums[B][X];
    ESPER_UNROLL for (int b = 0; b < B; ++b) {
        ESPER_UNROLL for (int x = 0; x < X; ++x) {
            sums[b][x] =
                adds ? load(out + b * out_plane + x * write_step) : splat(start == nullptr ? Real{} : start[b]);
        }
    }
    for (int64_t c = 0; c < channels; ++c) {
        for (int64_t t = 0; t < taps; ++t) {
            const Real* at = in + c * plane + offsets[t];
            // Weights first, then one vector of samples at a time: sums, weights and a vector fill the registers.
            Vector<Real> weight[B];
            ESPER_UNROLL for (int b = 0; b < B; ++b) weight[b] = splat_vector(weights[b]);
            ESPER_UNROLL for (int x = 0; x < X; ++x) {
                ESPER_UNROLL for (int v = 0; v < kVectors<Real>; ++v) {
                    const Vector<Real> read = load_vector(at + x * read_step + v * kWidth<Real>);
                    ESPER_UNROLL for (int b = 0; b < B; ++b) {
                        sums[b][x].part[v] = fma(read, weight[b], sums[b][x].part[v]);
                    }
                }
            }
            weights += B;
        }
    }
    ESPER_UNROLL for (int b = 0; b < B; ++b) {
        ESPER_UNROLL for (int x = 0; x < X; ++x) store(sums[b][x], out + b * out_plane + x * write_step);
    }
}

template <typename Real, int B>
void sum_positions(const Real* in, int64_t plane, int64_t channels, const int64_t* offsets, int64_t taps,
                   const Real* weights, const Real* start, bool adds, const Positions& at, Real* out,
                   int64_t out_plane) {
    constexpr int X = std::max(1, kAccumulators / kVectors<Real> / B);
    for (int64_t y = 0; y < at.rows; ++y) {
        const Real* from = in + y * at.read_row;
        Real* to = out + y * at.write_row;
        int64_t x = 0;
        for (; x + X <= at.columns; x += X) {
            sum_block<Real, B, X>(from + x * at.read_column, plane, channels, offsets, taps, weights, start, adds,
                                  at.read_column, to + x * at.write_column, out_plane, at.write_column);
        }
        for (; x < at.columns; ++x) {
            sum_block<Real, B, 1>(from + x * at.read_column, plane, channels, offsets, taps, weights, start, adds,
                                  at.read_column, to + x * at.write_column, out_plane, at.write_column);
        }
    }
}

// Outputs that are summed together: few at wide positions, so that their weights serve several positions.
template <typename Real>
int64_t outputs_together(int64_t columns, int64_t left) {
    const int64_t registers = kAccumulators / kVectors<Real>;
    const int64_t most = std::max<int64_t>(1, columns > 1 ? registers / 2 : registers);
    for (const int64_t block : {6, 3, 2, 1}) {
        if (block <= most && block <= left) return block;
    }
    return 1;
}

// Calls body(first output, outputs) for the blocks of a layer.
template <typename Real, typename Body>
ESPER_INLINE void for_blocks(int64_t outputs, int64_t columns, const Body& body) {
    for (int64_t o = 0; o < outputs;) {
        const int64_t block = outputs_together<Real>(columns, outputs - o);
        body(o, block);
        o += block;
    }
}

// Sums for all outputs of one group of samples. `weights` are packed by block, channel and tap.
template <typename Real>
void sum_outputs(const Real* in, int64_t plane, int64_t channels, const int64_t* offsets, int64_t taps,
                 const Real* weights, const Real* start, bool adds, const Positions& at, Real* out, int64_t out_plane,
                 int64_t outputs) {
    for_blocks<Real>(outputs, at.columns, [&](int64_t o, int64_t block) {
        const Real* first = start == nullptr ? nullptr : start + o;
        Real* to = out + o * out_plane;
        if (block == 6) {
            sum_positions<Real, 6>(in, plane, channels, offsets, taps, weights, first, adds, at, to, out_plane);
        } else if (block == 3) {
            sum_positions<Real, 3>(in, plane, channels, offsets, taps, weights, first, adds, at, to, out_plane);
        } else if (block == 2) {
            sum_positions<Real, 2>(in, plane, channels, offsets, taps, weights, first, adds, at, to, out_plane);
        } else {
            sum_positions<Real, 1>(in, plane, channels, offsets, taps, weights, first, adds, at, to, out_plane);
        }
        weights += block * channels * taps;
    });
}

template <typename Real>
void convolution_forward(Machine<Real>& machine, const Instruction& instruction) {
    const Convolution layer(instruction);
    const Value<Real>& in = machine.value(instruction.input);
    const Value<Real>& out = machine.value(instruction.output);
    const Tensor& weight = machine.tensors[static_cast<size_t>(layer.weight)];
    const Real* weights = machine.data(layer.weight);
    const int64_t* s = weight.strides;
    const int64_t taps = layer.kernel[0] * layer.kernel[1];
    int64_t offsets[kMaxTaps];
    for (int64_t t = 0; t < taps; ++t) {
        const int64_t ky = t / layer.kernel[1], kx = t % layer.kernel[1];
        offsets[t] = (ky * layer.dilation[0] - layer.padding[0]) * in.row() +
                     (kx * layer.dilation[1] - layer.padding[1]) * kLanes;
    }
    const int64_t channels = layer.depthwise ? 1 : in.channels;
    const int64_t outputs = layer.depthwise ? 1 : out.channels;  // that read the same channels
    const Positions at{out.height, out.width, layer.stride[0] * in.row(), layer.stride[1] * kLanes, out.row(), kLanes};
    machine.packed.resize(static_cast<size_t>(out.channels * channels * taps));
    Real* packed = machine.packed.data();
    const auto pack = [&](int64_t o, int64_t block) {
        for (int64_t c = 0; c < channels; ++c) {
            for (int64_t t = 0; t < taps; ++t) {
                for (int64_t b = 0; b < block; ++b) {
                    *packed++ =
                        weights[(o + b) * s[0] + c * s[1] + t / layer.kernel[1] * s[2] + t % layer.kernel[1] * s[3]];
                }
            }
        }
    };
    if (layer.depthwise) {
        for (int64_t c = 0; c < out.channels; ++c) pack(c, 1);
    } else {
        for_blocks<Real>(outputs, at.columns, pack);
    }
    const Real* bias = layer.bias < 0 ? nullptr : machine.data(layer.bias);
    for (int64_t g = 0; g < machine.groups; ++g) {
        for (int64_t c = 0; c < out.channels; c += outputs) {
            sum_outputs<Real>(in.data + in.at(g, layer.depthwise ? c : 0), in.plane(), channels, offsets, taps,
                              machine.packed.data() + c * channels * taps, bias == nullptr ? nullptr : bias + c, false,
                              at, out.data + out.at(g, c), out.plane(), outputs);
        }
    }
}

// The gradient of the input is a convolution of the output's with the weights turned around. With a stride, positions
// of the input with the same remainder read the same taps.
template <typename Real>
void convolution_input_gradient(Machine<Real>& machine, const Convolution& layer, Value<Real>& in,
                                const Value<Real>& out) {
    const int64_t* s = machine.tensors[static_cast<size_t>(layer.weight)].strides;
    const Real* weights = machine.data(layer.weight);
    const int64_t channels = layer.depthwise ? 1 : out.channels;
    const int64_t outputs = layer.depthwise ? 1 : in.channels;
    for (int64_t py = 0; py < std::min(layer.stride[0], in.height); ++py) {
        for (int64_t px = 0; px < std::min(layer.stride[1], in.width); ++px) {
            int64_t offsets[kMaxTaps], tap_weights[kMaxTaps];
            int64_t taps = 0;
            for (int64_t ky = 0; ky < layer.kernel[0]; ++ky) {
                for (int64_t kx = 0; kx < layer.kernel[1]; ++kx) {
                    const int64_t y = py + layer.padding[0] - ky * layer.dilation[0];
                    const int64_t x = px + layer.padding[1] - kx * layer.dilation[1];
                    if (y % layer.stride[0] != 0 || x % layer.stride[1] != 0) continue;
                    offsets[taps] = y / layer.stride[0] * out.row() + x / layer.stride[1] * kLanes;
                    tap_weights[taps++] = ky * s[2] + kx * s[3];
                }
            }
            const Positions at{(in.height - py + layer.stride[0] - 1) / layer.stride[0],
                               (in.width - px + layer.stride[1] - 1) / layer.stride[1],
                               out.row(),
                               kLanes,
                               layer.stride[0] * in.row(),
                               layer.stride[1] * kLanes};
            machine.packed.resize(static_cast<size_t>(std::max<int64_t>(1, in.channels * channels * taps)));
            Real* packed = machine.packed.data();
            const auto pack = [&](int64_t i, int64_t block) {
                for (int64_t c = 0; c < channels; ++c) {
                    for (int64_t t = 0; t < taps; ++t) {
                        for (int64_t b = 0; b < block; ++b) {
                            const int64_t o = layer.depthwise ? i : c;
                            const int64_t input = layer.depthwise ? 0 : i + b;
                            *packed++ = weights[o * s[0] + input * s[1] + tap_weights[t]];
                        }
                    }
                }
            };
            if (layer.depthwise) {
                for (int64_t c = 0; c < in.channels; ++c) pack(c, 1);
            } else {
                for_blocks<Real>(outputs, at.columns, pack);
            }
            const int64_t first = py * in.row() + px * kLanes;
            for (int64_t g = 0; g < machine.groups; ++g) {
                for (int64_t c = 0; c < in.channels; c += outputs) {
                    sum_outputs<Real>(out.gradient + out.at(g, layer.depthwise ? c : 0), out.plane(), channels, offsets,
                                      taps, machine.packed.data() + c * channels * taps, nullptr, in.gathered, at,
                                      in.gradient + in.at(g, c) + first, in.plane(), outputs);
                }
            }
        }
    }
    in.gathered = true;
}

// Sums of products over positions and samples for O outputs × I inputs: one vector of lanes at a time, so that more of
// the block fits into the registers.
template <typename Real, int O, int I>
void product_block(const Real* gradient, int64_t gradient_plane, int64_t gradient_group, const Real* in,
                   int64_t in_plane, int64_t in_group, int64_t groups, const Positions& at, Real* lanes) {
    for (int v = 0; v < kVectors<Real>; ++v) {
        Vector<Real> sums[O][I] = {};
        for (int64_t g = 0; g < groups; ++g) {
            for (int64_t y = 0; y < at.rows; ++y) {
                const Real* left = gradient + g * gradient_group + y * at.write_row + v * kWidth<Real>;
                const Real* right = in + g * in_group + y * at.read_row + v * kWidth<Real>;
                for (int64_t x = 0; x < at.columns; ++x) {
                    Vector<Real> d[O], h[I];
                    ESPER_UNROLL for (int o = 0; o < O; ++o) d[o] = load_vector(left + o * gradient_plane);
                    ESPER_UNROLL for (int i = 0; i < I; ++i) h[i] = load_vector(right + i * in_plane);
                    ESPER_UNROLL for (int o = 0; o < O; ++o) {
                        ESPER_UNROLL for (int i = 0; i < I; ++i) sums[o][i] = fma(d[o], h[i], sums[o][i]);
                    }
                    left += at.write_column;
                    right += at.read_column;
                }
            }
        }
        ESPER_UNROLL for (int o = 0; o < O; ++o) {
            ESPER_UNROLL for (int i = 0; i < I; ++i) {
                store_vector(sums[o][i], lanes + (o * I + i) * kLanes + v * kWidth<Real>);
            }
        }
    }
}

template <typename Real>
using ProductBlock = void (*)(const Real*, int64_t, int64_t, const Real*, int64_t, int64_t, int64_t, const Positions&,
                              Real*);

template <typename Real>
ProductBlock<Real> product_block_of(int64_t outputs, int64_t inputs) {
    static constexpr ProductBlock<Real> blocks[3][3] = {
        {product_block<Real, 1, 1>, product_block<Real, 1, 2>, product_block<Real, 1, 3>},
        {product_block<Real, 2, 1>, product_block<Real, 2, 2>, product_block<Real, 2, 3>},
        {product_block<Real, 3, 1>, product_block<Real, 3, 2>, product_block<Real, 3, 3>},
    };
    return blocks[outputs - 1][inputs - 1];
}

// Positions whose products are summed in the lanes' own precision before they are joined in float64.
constexpr int64_t kPositionsTogether = 256;

template <typename Real>
void convolution_weight_gradient(Machine<Real>& machine, const Convolution& layer, const Value<Real>& in,
                                 const Value<Real>& out) {
    const Tensor& weight = machine.tensors[static_cast<size_t>(layer.weight)];
    Real* result = machine.gradient(layer.weight);
    const int64_t* s = weight.strides;
    const int64_t inputs = layer.depthwise ? 1 : in.channels;
    const Positions at{out.height, out.width, layer.stride[0] * in.row(), layer.stride[1] * kLanes, out.row(), kLanes};
    const int64_t together = std::max<int64_t>(1, kPositionsTogether / out.positions());
    for (int64_t o = 0; o < out.channels;) {
        const int64_t rows = layer.depthwise ? 1 : std::min<int64_t>(3, out.channels - o);
        for (int64_t i = 0; i < inputs;) {
            const int64_t columns = std::min<int64_t>(3, inputs - i);
            const ProductBlock<Real> products = product_block_of<Real>(rows, columns);
            for (int64_t ky = 0; ky < layer.kernel[0]; ++ky) {
                for (int64_t kx = 0; kx < layer.kernel[1]; ++kx) {
                    const int64_t offset = (ky * layer.dilation[0] - layer.padding[0]) * in.row() +
                                           (kx * layer.dilation[1] - layer.padding[1]) * kLanes;
                    double sums[9] = {};
                    for (int64_t g = 0; g < machine.groups; g += together) {
                        Real lanes[9 * kLanes];
                        products(out.gradient + out.at(g, o), out.plane(), out.group(),
                                 in.data + in.at(g, layer.depthwise ? o : i) + offset, in.plane(), in.group(),
                                 std::min(together, machine.groups - g), at, lanes);
                        for (int64_t k = 0; k < rows * columns; ++k) {
                            sums[k] += total(load(lanes + k * kLanes));
                        }
                    }
                    for (int64_t k = 0; k < rows * columns; ++k) {
                        result[(o + k / columns) * s[0] + (i + k % columns) * s[1] + ky * s[2] + kx * s[3]] =
                            static_cast<Real>(sums[k]);
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
    if (machine.gradient(layer.weight) != nullptr) convolution_weight_gradient(machine, layer, in, out);
    if (layer.bias >= 0 && machine.gradient(layer.bias) != nullptr) {
        for (int64_t c = 0; c < out.channels; ++c) {
            double sum = 0;
            for (int64_t g = 0; g < machine.groups; ++g) {
                Lanes<Real> lanes = splat(Real{});
                for_rows(out, [&](int64_t offset, int64_t elements) {
                    const Real* row = out.gradient + out.at(g, c) + offset;
                    for (int64_t i = 0; i < elements; i += kLanes) lanes = lanes + load(row + i);
                });
                sum += total(lanes);
            }
            machine.gradient(layer.bias)[c] = static_cast<Real>(sum);
        }
    }
    if (in.needed) convolution_input_gradient(machine, layer, in, out);
}

}  // namespace
}  // namespace esper::tape
