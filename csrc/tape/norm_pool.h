// BatchNorm, ReLU and a max pool of 2 × 2 windows in one: what the norm writes for the pool stays in registers, and is
// computed again in the backward pass. The numbers are those of the separate layers, to the bit: a seed that reads
// between norm and pool changes nothing else.
#pragma once

#include "batch_norm.h"
#include "pool.h"

namespace esper::tape {
namespace {

// Whether a pool may take in the norm before it, whose output nothing else may read.
inline bool pools_norm(const Instruction& norm, const Instruction& pool) {
    if (norm.layer != kBatchNorm || !BatchNorm(norm).relu || pool.layer != kMaxPool || pool.input != norm.output) {
        return false;
    }
    const int64_t* n = pool.number;
    return n[0] == 2 && n[1] == 2 && n[2] == 2 && n[3] == 2 && n[4] == 0 && n[5] == 0;
}

// The windows of a plane of 2 × 2; an odd last row or column lies outside of all.
template <typename Real, typename Body>
ESPER_INLINE void for_squares(const Value<Real>& in, const Value<Real>& out, const Body& body) {
    for (int64_t y = 0; y < out.height; ++y) {
        for (int64_t x = 0; x < out.width; ++x) body(2 * y * in.row() + 2 * x * kLanes, y * out.row() + x * kLanes);
    }
}

// The largest of a window after the norm, and its number in the window as a vector.
template <typename Real>
struct Largest {
    Vector<Real> number;
    decltype(Vector<Real>{} < Vector<Real>{}) second, third, fourth;  // whether it is that; the first otherwise

    ESPER_INLINE Largest(const Normal<Real>& normal, const Real* window, int64_t row) {
        number = normal(load_vector(window));
        const Vector<Real> b = normal(load_vector(window + kLanes));
        second = beats<Real>(b, number);
        number = second ? b : number;
        const Vector<Real> c = normal(load_vector(window + row));
        third = beats<Real>(c, number);
        number = third ? c : number;
        const Vector<Real> d = normal(load_vector(window + row + kLanes));
        fourth = beats<Real>(d, number);
        number = fourth ? d : number;
    }
};

template <typename Real>
void norm_pool_forward(Machine<Real>& machine, const Instruction& norm, const Instruction& pool) {
    const BatchNorm layer(norm);
    const Value<Real>& in = machine.value(norm.input);
    const Value<Real>& out = machine.value(pool.output);
    Real* saved = machine.kept(norm, 2 * in.channels);
    const double momentum = count_batch(machine, layer);
    for (int64_t c = 0; c < in.channels; ++c) {
        const Normal<Real> normal = normal_of_channel(machine, layer, in, c, momentum, saved);
        for (int64_t g = 0; g < machine.groups; ++g) {
            const int64_t count = machine.count(g);
            const Real* from = in.data + in.at(g, c);
            Real* to = out.data + out.at(g, c);
            for_squares(in, out, [&](int64_t window, int64_t at) __attribute__((always_inline)) {
                Lanes<Real> result;
                ESPER_UNROLL for (int v = 0; v < kVectors<Real>; ++v) {
                    result.part[v] = Largest<Real>(normal, from + window + v * kWidth<Real>, in.row()).number;
                }
                store(only(relu(result), count), to + at);
            });
        }
    }
}

// The gradients after the norm for the two rows of a plane that a row of windows reads, [2, width, 16]. Numbers outside
// of all windows keep theirs.
template <typename Real>
ESPER_INLINE void spread_gradient(const Normal<Real>& normal, const Real* rows, int64_t row, int64_t windows,
                                  const Real* result, const Real* gradient, Real* spread) {
    const Vector<Real> zero = {};
    for (int64_t x = 0; x < windows; ++x) {
        ESPER_UNROLL for (int v = 0; v < kVectors<Real>; ++v) {
            const int64_t at = x * kLanes + v * kWidth<Real>, window = 2 * x * kLanes + v * kWidth<Real>;
            const Largest<Real> largest(normal, rows + window, row);
            Vector<Real> left = load_vector(gradient + at);
            left = load_vector(result + at) <= zero ? zero : left;
            const auto take = [&](const auto& chosen, int64_t offset) __attribute__((always_inline)) {
                store_vector(chosen ? left : zero, spread + window + offset);
                left = chosen ? zero : left;
            };
            take(largest.fourth, row + kLanes);
            take(largest.third, row);
            take(largest.second, kLanes);
            store_vector(left, spread + window);
        }
    }
}

// Calls body(offset, gradient) for each position of a plane, row by row, with the gradient after the norm.
template <typename Real, typename Body>
ESPER_INLINE void for_spread(Machine<Real>& machine, const Normal<Real>& normal, const Value<Real>& in,
                             const Value<Real>& out, int64_t g, int64_t c, const Body& body) {
    const int64_t row = in.row();
    machine.packed.assign(static_cast<size_t>(2 * row), Real{});
    Real* spread = machine.packed.data();
    for (int64_t y = 0; y < in.height; y += 2) {
        const int64_t first = y * row, end = std::min(first + 2 * row, in.elements());
        if (y / 2 < out.height) {
            const int64_t at = out.at(g, c) + y / 2 * out.row();
            spread_gradient(normal, in.data + in.at(g, c) + first, row, out.width, out.data + at, out.gradient + at,
                            spread);
        } else {
            std::fill_n(spread, row, Real{});
        }
        for (int64_t i = first; i < end; i += kLanes) body(i, load(spread + i - first));
    }
}

// The largest numbers are found twice: to keep the gradients in between would take more memory than the caches have.
template <typename Real>
void norm_pool_backward(Machine<Real>& machine, const Instruction& norm, const Instruction& pool) {
    const BatchNorm layer(norm);
    Value<Real>& in = machine.value(norm.input);
    const Value<Real>& out = machine.value(pool.output);
    const Real* saved = machine.kept(norm, 2 * in.channels);
    for (int64_t c = 0; c < in.channels; ++c) {
        const Normal<Real> normal = saved_normal(machine, layer, in, c, saved);
        GradientSums<Real> sums(splat(saved[c]));
        for (int64_t g = 0; g < machine.groups; ++g) {
            const Real* plane = in.data + in.at(g, c);
            for_spread(machine, normal, in, out, g, c,
                       [&](int64_t i, const Lanes<Real>& d)
                           __attribute__((always_inline)) { sums.add(load(plane + i), d); });
            sums.join(machine.count(g));
        }
        const NormGradient<Real> of_input = norm_gradient(machine, layer, in, c, saved, sums.sum, sums.product);
        if (!in.needed) continue;
        for (int64_t g = 0; g < machine.groups; ++g) {
            const int64_t count = machine.count(g), first = in.at(g, c);
            for_spread(machine, normal, in, out, g, c,
                       [&](int64_t i, const Lanes<Real>& d) __attribute__((always_inline)) {
                           const Lanes<Real> result = of_input(load(in.data + first + i), d);
                           give(only(result, count), in.gathered, in.gradient + first + i);
                       });
        }
    }
    if (in.needed) in.gathered = true;
}

}  // namespace
}  // namespace esper::tape
