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

template <typename Real>
void norm_pool_backward(Machine<Real>& machine, const Instruction& norm, const Instruction& pool) {
    const BatchNorm layer(norm);
    Value<Real>& in = machine.value(norm.input);
    const Value<Real>& out = machine.value(pool.output);
    const Real* saved = machine.kept(norm, 2 * in.channels);
    const Vector<Real> zero = {};
    const bool odd = in.height % 2 != 0 || in.width % 2 != 0;
    machine.packed.resize(static_cast<size_t>(machine.groups * in.plane()));  // gradients of a channel after the norm
    for (int64_t c = 0; c < in.channels; ++c) {
        const Normal<Real> normal = saved_normal(machine, layer, in, c, saved);
        double sum = 0, product = 0;
        for (int64_t g = 0; g < machine.groups; ++g) {
            const Real* from = in.data + in.at(g, c);
            const Real* result = out.data + out.at(g, c);
            const Real* gradient = out.gradient + out.at(g, c);
            Real* to = machine.packed.data() + g * in.plane();
            if (odd) std::fill_n(to, in.elements(), Real{});
            for_squares(in, out, [&](int64_t window, int64_t at) __attribute__((always_inline)) {
                ESPER_UNROLL for (int v = 0; v < kVectors<Real>; ++v) {
                    const int64_t lane = v * kWidth<Real>;
                    const Largest<Real> largest(normal, from + window + lane, in.row());
                    Vector<Real> left = load_vector(gradient + at + lane);
                    left = load_vector(result + at + lane) <= zero ? zero : left;
                    const auto take = [&](const auto& chosen, int64_t offset) __attribute__((always_inline)) {
                        store_vector(chosen ? left : zero, to + window + lane + offset);
                        left = chosen ? zero : left;
                    };
                    take(largest.fourth, in.row() + kLanes);
                    take(largest.third, in.row());
                    take(largest.second, kLanes);
                    store_vector(left, to + window + lane);
                }
            });
            add_gradient(from, to, in.elements(), splat(saved[c]), machine.count(g), sum, product);
        }
        const NormGradient<Real> of_input = norm_gradient(machine, layer, in, c, saved, sum, product);
        if (!in.needed) continue;
        for (int64_t g = 0; g < machine.groups; ++g) {
            const int64_t count = machine.count(g), first = in.at(g, c);
            const Real* d = machine.packed.data() + g * in.plane();
            for (int64_t i = 0; i < in.elements(); i += kLanes) {
                const Lanes<Real> result = of_input(load(in.data + first + i), load(d + i));
                give(only(result, count), in.gathered, in.gradient + first + i);
            }
        }
    }
    if (in.needed) in.gathered = true;
}

}  // namespace
}  // namespace esper::tape
