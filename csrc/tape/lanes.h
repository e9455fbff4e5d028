// Sixteen samples at a time: every value of a tape lies with the sample innermost, so that a layer is vector code over
// samples, whatever its number of channels.
//
// A Lanes holds one number of each of 16 samples in as many registers as that takes. The number of lanes is the same
// for every instruction set, sums run in a fixed order, and products are added by a fused multiply-add where the
// hardware has one, so AVX2 and AVX-512 compute the same bits. Included once for each instruction set.
#pragma once

#include <cstdint>
#include <cstring>

#include "tape.h"

#define ESPER_UNROLL _Pragma("GCC unroll 16")

namespace esper::tape {
namespace {

#if ESPER_LEVEL == 4
constexpr int kBytes = 64;
constexpr int kAccumulators = 12;  // registers that the inner loops sum in
#elif ESPER_LEVEL == 3
constexpr int kBytes = 32;
constexpr int kAccumulators = 12;
#else
constexpr int kBytes = 16;
constexpr int kAccumulators = 8;
#endif

typedef float FloatVector __attribute__((vector_size(kBytes)));
typedef double DoubleVector __attribute__((vector_size(kBytes)));
typedef int32_t IntVector __attribute__((vector_size(kBytes)));
typedef int64_t LongVector __attribute__((vector_size(kBytes)));

template <typename Real>
struct VectorOf;
template <>
struct VectorOf<float> {
    using Type = FloatVector;
    using Mask = IntVector;
};
template <>
struct VectorOf<double> {
    using Type = DoubleVector;
    using Mask = LongVector;
};
template <typename Real>
using Vector = typename VectorOf<Real>::Type;

template <typename Real>
ESPER_INLINE Vector<Real> load_vector(const Real* x) {
    Vector<Real> vector;
    std::memcpy(&vector, x, sizeof(vector));
    return vector;
}

template <typename Real>
ESPER_INLINE void store_vector(const Vector<Real>& vector, Real* x) {
    std::memcpy(x, &vector, sizeof(vector));
}

template <typename Real>
ESPER_INLINE Vector<Real> splat_vector(Real x) {
    return x - Vector<Real>{};  // x + 0 would not be x if it is -0
}

// a b + c, rounded once.
ESPER_INLINE FloatVector fma(const FloatVector& a, const FloatVector& b, const FloatVector& c) {
#if ESPER_LEVEL == 4
    return (FloatVector)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif ESPER_LEVEL == 3
    return (FloatVector)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}
ESPER_INLINE DoubleVector fma(const DoubleVector& a, const DoubleVector& b, const DoubleVector& c) {
#if ESPER_LEVEL == 4
    return (DoubleVector)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif ESPER_LEVEL == 3
    return (DoubleVector)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#else
    return a * b + c;
#endif
}

template <typename Real>
constexpr int kWidth = kBytes / static_cast<int>(sizeof(Real));  // numbers in a vector
template <typename Real>
constexpr int kVectors = kLanes / kWidth<Real>;  // vectors in a Lanes

template <typename Real>
struct Lanes {
    Vector<Real> part[kVectors<Real>];
};

template <typename Real>
ESPER_INLINE Lanes<Real> load(const Real* x) {
    Lanes<Real> lanes;
    ESPER_UNROLL for (int v = 0; v < kVectors<Real>; ++v) lanes.part[v] = load_vector(x + v * kWidth<Real>);
    return lanes;
}

template <typename Real>
ESPER_INLINE void store(const Lanes<Real>& lanes, Real* x) {
    ESPER_UNROLL for (int v = 0; v < kVectors<Real>; ++v) store_vector(lanes.part[v], x + v * kWidth<Real>);
}

template <typename Real>
ESPER_INLINE Lanes<Real> splat(Real x) {
    Lanes<Real> lanes;
    ESPER_UNROLL for (int v = 0; v < kVectors<Real>; ++v) lanes.part[v] = splat_vector(x);
    return lanes;
}

// Applies an expression of vectors to each part.
template <typename Real, typename Body>
ESPER_INLINE Lanes<Real> each(const Lanes<Real>& a, const Body& body) {
    Lanes<Real> result;
    ESPER_UNROLL for (int v = 0; v < kVectors<Real>; ++v) result.part[v] = body(a.part[v]);
    return result;
}
template <typename Real, typename Body>
ESPER_INLINE Lanes<Real> each(const Lanes<Real>& a, const Lanes<Real>& b, const Body& body) {
    Lanes<Real> result;
    ESPER_UNROLL for (int v = 0; v < kVectors<Real>; ++v) result.part[v] = body(a.part[v], b.part[v]);
    return result;
}

template <typename Real>
ESPER_INLINE Lanes<Real> operator+(const Lanes<Real>& a, const Lanes<Real>& b) {
    return each(a, b, [](const auto& x, const auto& y) __attribute__((always_inline)) { return x + y; });
}
template <typename Real>
ESPER_INLINE Lanes<Real> operator-(const Lanes<Real>& a, const Lanes<Real>& b) {
    return each(a, b, [](const auto& x, const auto& y) __attribute__((always_inline)) { return x - y; });
}
template <typename Real>
ESPER_INLINE Lanes<Real> operator*(const Lanes<Real>& a, const Lanes<Real>& b) {
    return each(a, b, [](const auto& x, const auto& y) __attribute__((always_inline)) { return x * y; });
}
template <typename Real>
ESPER_INLINE Lanes<Real> operator/(const Lanes<Real>& a, const Lanes<Real>& b) {
    return each(a, b, [](const auto& x, const auto& y) __attribute__((always_inline)) { return x / y; });
}
template <typename Real>
ESPER_INLINE Lanes<Real> operator*(const Lanes<Real>& a, Real b) {
    return a * splat(b);
}
template <typename Real>
ESPER_INLINE Lanes<Real> fma(const Lanes<Real>& a, const Lanes<Real>& b, const Lanes<Real>& c) {
    Lanes<Real> result;
    ESPER_UNROLL for (int v = 0; v < kVectors<Real>; ++v) result.part[v] = fma(a.part[v], b.part[v], c.part[v]);
    return result;
}

// max(x, 0) that keeps a NaN, as torch's does.
template <typename Real>
ESPER_INLINE Lanes<Real> relu(const Lanes<Real>& a) {
    return each(a, [](const auto& x) __attribute__((always_inline)) {
        const Vector<Real> zero = {};
        return x <= zero ? zero : x;
    });
}
// The gradient of relu, whose output is `y`: that of a NaN passes.
template <typename Real>
ESPER_INLINE Lanes<Real> relu_gradient(const Lanes<Real>& y, const Lanes<Real>& gradient) {
    return each(y, gradient, [](const auto& x, const auto& g) __attribute__((always_inline)) {
        const Vector<Real> zero = {};
        return x <= zero ? zero : g;
    });
}

// A function of libm for each lane: slower than vector code, and as exact as torch's.
template <typename Real, typename Function>
ESPER_INLINE Lanes<Real> by_lane(const Lanes<Real>& a, const Function& function) {
    Real values[kLanes];
    store(a, values);
    for (int l = 0; l < kLanes; ++l) values[l] = function(values[l]);
    return load(values);
}

// The lanes of samples: the first `count` of a group; zero in the others.
template <typename Real>
ESPER_INLINE Lanes<Real> only(const Lanes<Real>& a, int64_t count) {
    if (count >= kLanes) return a;
    Real values[kLanes];
    store(a, values);
    for (int64_t l = count; l < kLanes; ++l) values[l] = 0;
    return load(values);
}

// The sum of all lanes in float64, halves first. Through memory, where the compiler makes vectors of the loops.
template <typename Real>
ESPER_INLINE double total(const Lanes<Real>& a) {
    Real lanes[kLanes];
    store(a, lanes);
    double sums[kLanes / 2];
    for (int l = 0; l < 8; ++l) sums[l] = static_cast<double>(lanes[l]) + static_cast<double>(lanes[l + 8]);
    for (int l = 0; l < 4; ++l) sums[l] += sums[l + 4];
    return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

}  // namespace
}  // namespace esper::tape
