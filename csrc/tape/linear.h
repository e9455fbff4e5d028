// The gradient of a linear layer's weights: a layer of one position, for which the sums of products over samples are a
// product of matrices.
#pragma once

#include "machine.h"

namespace esper::tape {
namespace {

constexpr int64_t kGroupsTogether = 16;  // whose products are summed in float before they join in float64

// Adds the products of O outputs and J vectors of inputs, summed over `samples`, to sums [O][inputs]: planes of groups
// on the left, [samples][inputs] on the right.
template <typename Real, int O, int J>
ESPER_INLINE void outer_block(const Real* left, int64_t left_plane, int64_t left_group, int64_t samples,
                              const Real* right, int64_t inputs, double* sums) {
    Vector<Real> sum[O][J] = {};
    for (int64_t s = 0; s < samples; ++s) {
        const Real* at = left + s / kLanes * left_group + s % kLanes;
        Vector<Real> h[J];
        ESPER_UNROLL for (int j = 0; j < J; ++j) h[j] = load_vector(right + s * inputs + j * kWidth<Real>);
        ESPER_UNROLL for (int o = 0; o < O; ++o) {
            const Vector<Real> d = splat_vector(at[o * left_plane]);
            ESPER_UNROLL for (int j = 0; j < J; ++j) sum[o][j] = fma(d, h[j], sum[o][j]);
        }
    }
    ESPER_UNROLL for (int o = 0; o < O; ++o) {
        Real row[J * kWidth<Real>];
        ESPER_UNROLL for (int j = 0; j < J; ++j) store_vector(sum[o][j], row + j * kWidth<Real>);
        for (int n = 0; n < J * kWidth<Real>; ++n) sums[o * inputs + n] += static_cast<double>(row[n]);
    }
}

template <typename Real>
void linear_weight_gradient(Machine<Real>& machine, int64_t weight, const Value<Real>& in, const Value<Real>& out) {
    constexpr int64_t kColumns = 2 * kWidth<Real>;
    const int64_t inputs = (in.channels + kColumns - 1) / kColumns * kColumns;  // with columns of zeros
    machine.joined.assign(static_cast<size_t>(out.channels * inputs), 0.0);
    for (int64_t first = 0; first < machine.groups; first += kGroupsTogether) {
        const int64_t groups = std::min(kGroupsTogether, machine.groups - first);
        machine.packed.assign(static_cast<size_t>(groups * kLanes * inputs), Real{});
        Real* turned = machine.packed.data();
        for (int64_t g = 0; g < groups; ++g) {
            for (int64_t i = 0; i < in.channels; ++i) {
                const Real* from = in.data + in.at(first + g, i);
                for (int64_t l = 0; l < kLanes; ++l) turned[(g * kLanes + l) * inputs + i] = from[l];
            }
        }
        const Real* left = out.gradient + out.at(first, 0);
        const int64_t samples = std::min(machine.samples - first * kLanes, groups * kLanes);
        for (int64_t i = 0; i < inputs; i += kColumns) {
            double* sums = machine.joined.data() + i;
            int64_t o = 0;
            for (; o + 4 <= out.channels; o += 4) {
                outer_block<Real, 4, 2>(left + o * out.plane(), out.plane(), out.group(), samples, turned + i, inputs,
                                        sums + o * inputs);
            }
            for (; o < out.channels; ++o) {
                outer_block<Real, 1, 2>(left + o * out.plane(), out.plane(), out.group(), samples, turned + i, inputs,
                                        sums + o * inputs);
            }
        }
    }
    const int64_t* strides = machine.tensors[static_cast<size_t>(weight)].strides;
    Real* result = machine.gradient(weight);
    for (int64_t o = 0; o < out.channels; ++o) {
        for (int64_t i = 0; i < in.channels; ++i) {
            const double sum = machine.joined[static_cast<size_t>(o * inputs + i)];
            result[o * strides[0] + i * strides[1]] = static_cast<Real>(sum);
        }
    }
}

}  // namespace
}  // namespace esper::tape
