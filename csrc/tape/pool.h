// Pools over windows of [B, C, H, W], and a flattening of positions.
//
// numbers: kernel height and width, stride, padding in both dimensions; for averages, whether padding counts.
#pragma once

#include "machine.h"

namespace esper::tape {
namespace {

struct Window {
    // The positions that output (y, x) reads: rows y0 to y1 and columns x0 to x1 of the input.
    Window(const Instruction& i, int64_t height, int64_t width, int64_t y, int64_t x) {
        const int64_t top = y * i.number[2] - i.number[4], left = x * i.number[3] - i.number[5];
        y0 = std::max<int64_t>(top, 0);
        x0 = std::max<int64_t>(left, 0);
        y1 = std::min(top + i.number[0], height);
        x1 = std::min(left + i.number[1], width);
        if (i.number[6] != 0) {  // with the padding, but not with what a ceiling adds beyond it
            divisor = (std::min(top + i.number[0], height + i.number[4]) - top) *
                      (std::min(left + i.number[1], width + i.number[5]) - left);
        } else {
            divisor = (y1 - y0) * (x1 - x0);
        }
    }
    int64_t y0, y1, x0, x1, divisor;
};

// Calls body(group, channel, window, offset in the output) for each output of a pool.
template <typename Real, typename Body>
ESPER_INLINE void for_windows(const Machine<Real>& machine, const Instruction& instruction, const Value<Real>& in,
                              const Value<Real>& out, const Body& body) {
    for (int64_t g = 0; g < machine.groups; ++g) {
        for (int64_t c = 0; c < out.channels; ++c) {
            for (int64_t y = 0; y < out.height; ++y) {
                for (int64_t x = 0; x < out.width; ++x) {
                    const Window window(instruction, in.height, in.width, y, x);
                    body(in.at(g, c), window, out.at(g, c) + y * out.row() + x * kLanes);
                }
            }
        }
    }
}

// The first of the largest numbers, and a NaN above all, as torch has it: whether x takes the place of `best`.
template <typename Real>
ESPER_INLINE auto beats(const Vector<Real>& x, const Vector<Real>& best) {
    return (x > best) | (x != x);
}

template <typename Real>
void max_pool_forward(Machine<Real>& machine, const Instruction& instruction) {
    const Value<Real>& in = machine.value(instruction.input);
    const Value<Real>& out = machine.value(instruction.output);
    for_windows(machine, instruction, in, out, [&](int64_t plane, const Window& window, int64_t to) {
        Lanes<Real> best = splat(-static_cast<Real>(INFINITY));
        for (int64_t y = window.y0; y < window.y1; ++y) {
            for (int64_t x = window.x0; x < window.x1; ++x) {
                const Lanes<Real> at = load(in.data + plane + y * in.row() + x * kLanes);
                best = each(at, best, [](const auto& a, const auto& b) __attribute__((always_inline)) {
                    return beats<Real>(a, b) ? a : b;
                });
            }
        }
        store(best, out.data + to);
    });
}

template <typename Real>
void max_pool_backward(Machine<Real>& machine, const Instruction& instruction) {
    Value<Real>& in = machine.value(instruction.input);
    const Value<Real>& out = machine.value(instruction.output);
    if (!in.needed) return;
    start_gradient(machine, in);
    for_windows(machine, instruction, in, out, [&](int64_t plane, const Window& window, int64_t from) {
        ESPER_UNROLL for (int v = 0; v < kVectors<Real>; ++v) {
            // The same search again, for the position; as numbers of the vector's own type.
            Vector<Real> best = splat_vector(-static_cast<Real>(INFINITY));
            Vector<Real> chosen = splat_vector(Real{-1});
            Real position = 0;
            for (int64_t y = window.y0; y < window.y1; ++y) {
                for (int64_t x = window.x0; x < window.x1; ++x) {
                    const Vector<Real> at = load_vector(in.data + plane + y * in.row() + x * kLanes + v * kWidth<Real>);
                    // Even if all are -inf, the first is chosen.
                    const auto better = beats<Real>(at, best) | (chosen < Vector<Real>{});
                    best = better ? at : best;
                    chosen = better ? splat_vector(position) : chosen;
                    position += 1;
                }
            }
            const Vector<Real> gradient = load_vector(out.gradient + from + v * kWidth<Real>);
            position = 0;
            for (int64_t y = window.y0; y < window.y1; ++y) {
                for (int64_t x = window.x0; x < window.x1; ++x) {
                    Real* at = in.gradient + plane + y * in.row() + x * kLanes + v * kWidth<Real>;
                    const Vector<Real> zero = {};
                    store_vector(load_vector(at) + (chosen == splat_vector(position) ? gradient : zero), at);
                    position += 1;
                }
            }
        }
    });
}

// Whether an average is that of a whole plane.
template <typename Real>
bool is_mean(const Instruction& i, const Value<Real>& in, const Value<Real>& out) {
    return out.positions() == 1 && i.number[0] == in.height && i.number[1] == in.width && i.number[4] == 0 &&
           i.number[5] == 0;
}

template <typename Real>
void average_pool_forward(Machine<Real>& machine, const Instruction& instruction) {
    const Value<Real>& in = machine.value(instruction.input);
    const Value<Real>& out = machine.value(instruction.output);
    if (is_mean(instruction, in, out)) {
        const Lanes<Real> positions = splat(static_cast<Real>(in.positions()));
        for_positions(machine, out, [&](int64_t to, int64_t g, int64_t c) {
            const Real* plane = in.data + in.at(g, c);
            Lanes<Real> sum = splat(Real{});
            for (int64_t i = 0; i < in.elements(); i += kLanes) sum = sum + load(plane + i);
            store(sum / positions, out.data + to);
        });
        return;
    }
    for_windows(machine, instruction, in, out, [&](int64_t plane, const Window& window, int64_t to) {
        Lanes<Real> sum = splat(Real{});
        for (int64_t y = window.y0; y < window.y1; ++y) {
            for (int64_t x = window.x0; x < window.x1; ++x) {
                sum = sum + load(in.data + plane + y * in.row() + x * kLanes);
            }
        }
        store(sum / splat(static_cast<Real>(window.divisor)), out.data + to);
    });
}

template <typename Real>
void average_pool_backward(Machine<Real>& machine, const Instruction& instruction) {
    Value<Real>& in = machine.value(instruction.input);
    const Value<Real>& out = machine.value(instruction.output);
    if (!in.needed) return;
    if (is_mean(instruction, in, out)) {
        const Lanes<Real> positions = splat(static_cast<Real>(in.positions()));
        for_positions(machine, out, [&](int64_t from, int64_t g, int64_t c) {
            Real* plane = in.gradient + in.at(g, c);
            const Lanes<Real> share = load(out.gradient + from) / positions;
            for (int64_t i = 0; i < in.elements(); i += kLanes) give(share, in.gathered, plane + i);
        });
        in.gathered = true;
        return;
    }
    start_gradient(machine, in);
    for_windows(machine, instruction, in, out, [&](int64_t plane, const Window& window, int64_t from) {
        const Lanes<Real> share = load(out.gradient + from) / splat(static_cast<Real>(window.divisor));
        for (int64_t y = window.y0; y < window.y1; ++y) {
            for (int64_t x = window.x0; x < window.x1; ++x) {
                Real* at = in.gradient + plane + y * in.row() + x * kLanes;
                store(load(at) + share, at);
            }
        }
    });
}

// Calls body(offset in the input, offset in the output) for each number of a sample, in the order of torch's flatten.
template <typename Real, typename Body>
ESPER_INLINE void for_flattened(const Machine<Real>& machine, const Value<Real>& in, const Value<Real>& out,
                                const Body& body) {
    for_positions(machine, in, [&](int64_t at, int64_t g, int64_t c) {
        const int64_t position = (at - in.at(g, c)) / kLanes;
        body(at, out.at(g, c * in.positions() + position));
    });
}

template <typename Real>
void flatten_forward(Machine<Real>& machine, const Instruction& instruction) {
    const Value<Real>& in = machine.value(instruction.input);
    const Value<Real>& out = machine.value(instruction.output);
    for_flattened(machine, in, out, [&](int64_t from, int64_t to) { store(load(in.data + from), out.data + to); });
}

template <typename Real>
void flatten_backward(Machine<Real>& machine, const Instruction& instruction) {
    Value<Real>& in = machine.value(instruction.input);
    const Value<Real>& out = machine.value(instruction.output);
    if (!in.needed) return;
    for_flattened(machine, in, out,
                  [&](int64_t to, int64_t from) { give(load(out.gradient + from), in.gathered, in.gradient + to); });
    in.gathered = true;
}

}  // namespace
}  // namespace esper::tape
