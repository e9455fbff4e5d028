// Products of matrices whose second factor, and result, have rows of 16 numbers: features by samples, or by positions.
#pragma once

#include <algorithm>

#include "lanes.h"

namespace esper::tape {
namespace {

// The first factor of a product: number (o, i) is data[o * row + i * column].
template <typename Real>
struct Factors {
    const Real* data;
    int64_t row, column;
};

// Rows of 16 numbers in memory.
template <typename Real>
struct Rows {
    Real* data;
    int64_t stride;
};

enum class Start { kZero, kBias, kResult };  // what a sum starts from

template <typename Real, int O, Start kStart>
ESPER_INLINE void product_block(const Factors<Real>& factors, const Rows<const Real>& x, int64_t count,
                                const Rows<Real>& out, const Real* bias) {
    Vector<Real> sum[O][kVectors<Real>] = {};
    ESPER_UNROLL for (int o = 0; o < O; ++o) {
        ESPER_UNROLL for (int v = 0; v < kVectors<Real>; ++v) {
            if (kStart == Start::kBias) sum[o][v] = splat_vector(bias[o]);
            if (kStart == Start::kResult) sum[o][v] = load_vector(out.data + o * out.stride + v * kWidth<Real>);
        }
    }
    for (int64_t i = 0; i < count; ++i) {
        const Lanes<Real> row = load(x.data + i * x.stride);
        ESPER_UNROLL for (int o = 0; o < O; ++o) {
            const Vector<Real> factor = splat_vector(factors.data[o * factors.row + i * factors.column]);
            ESPER_UNROLL for (int v = 0; v < kVectors<Real>; ++v) sum[o][v] = fma(factor, row.part[v], sum[o][v]);
        }
    }
    ESPER_UNROLL for (int o = 0; o < O; ++o) {
        ESPER_UNROLL for (int v = 0; v < kVectors<Real>; ++v) {
            store_vector(sum[o][v], out.data + o * out.stride + v * kWidth<Real>);
        }
    }
}

template <typename Real, int O, Start kStart>
ESPER_INLINE void product_from(Factors<Real> factors, int64_t outputs, const Rows<const Real>& x, int64_t count,
                               Rows<Real> out, const Real* bias) {
    for (; outputs >= O; outputs -= O) {
        product_block<Real, O, kStart>(factors, x, count, out, bias);
        factors.data += O * factors.row;
        out.data += O * out.stride;
        if (kStart == Start::kBias) bias += O;
    }
    if constexpr (O > 1) product_from<Real, (O + 1) / 2, kStart>(factors, outputs, x, count, out, bias);
}

// Row o of the result, of `outputs` rows, is the sum over i < count of factor (o, i) times row i of x, and what it
// starts from: zero, bias[o] in each lane, or the row itself.
template <typename Real, Start kStart = Start::kZero>
void product(const Factors<Real>& factors, int64_t outputs, const Rows<const Real>& x, int64_t count,
             const Rows<Real>& out, const Real* bias = nullptr) {
    constexpr int kTogether = std::max(kAccumulators / kVectors<Real>, 1);
    product_from<Real, kTogether, kStart>(factors, outputs, x, count, out, bias);
}

// Transposes a square of as many rows and columns as a vector has numbers; row n lies at from(n), and goes to to(n).
template <typename Real, typename From, typename To>
ESPER_INLINE void transpose_square(const From& from, const To& to) {
    using Indices = typename VectorOf<Real>::Mask;
    constexpr int kSide = kWidth<Real>;
    Vector<Real> rows[kSide];
    ESPER_UNROLL for (int n = 0; n < kSide; ++n) rows[n] = load_vector(from(n));
    // Swaps the upper right and the lower left quarter of squares of 2, 4, ... rows.
    ESPER_UNROLL for (int half = 1; half < kSide; half *= 2) {
        Indices upper, lower;
        for (int l = 0; l < kSide; ++l) {
            const bool right = (l & half) != 0;
            upper[l] = right ? kSide + l - half : l;
            lower[l] = right ? kSide + l : l + half;
        }
        ESPER_UNROLL for (int n = 0; n < kSide; ++n) {
            if ((n & half) != 0) continue;
            const Vector<Real> first = rows[n], second = rows[n + half];
            rows[n] = __builtin_shuffle(first, second, upper);
            rows[n + half] = __builtin_shuffle(first, second, lower);
        }
    }
    ESPER_UNROLL for (int n = 0; n < kSide; ++n) store_vector(rows[n], to(n));
}

// Transposes `rows` rows of 16 numbers, a multiple of a vector's; rows are read up to that.
template <typename Real>
void transpose(const Rows<const Real>& from, int64_t rows, const Rows<Real>& to) {
    constexpr int kSide = kWidth<Real>;
    for (int64_t r = 0; r < rows; r += kSide) {
        for (int64_t l = 0; l < kLanes; l += kSide) {
            transpose_square<Real>(
                [&](int n) __attribute__((always_inline)) { return from.data + (r + n) * from.stride + l; },
                [&](int n) __attribute__((always_inline)) { return to.data + (l + n) * to.stride + r; });
        }
    }
}

}  // namespace
}  // namespace esper::tape
