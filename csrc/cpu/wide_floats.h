// Float lanes, as many as a register holds: reading and writing them in each storage type, exp and log.
//
// The types are GCC's vectors of ESPER_WIDE_BYTES, which the file that includes this defines to be the width of the
// registers it compiles for: wider ones are taken apart, and comparisons then element by element. Everything here is
// inlined into the caller and its instruction set. Lanes travel by reference: how vectors are passed by value differs
// between instruction sets.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "clones.h"

#define ESPER_JOIN_(a, b) a##b
#define ESPER_JOIN(a, b) ESPER_JOIN_(a, b)
#define ESPER_WIDE_NAMESPACE ESPER_JOIN(of_bytes_, ESPER_WIDE_BYTES)

// One namespace a width, so that the copies of different files are different functions to the linker.
namespace esper::wide {
inline namespace ESPER_WIDE_NAMESPACE {

typedef float Floats __attribute__((vector_size(ESPER_WIDE_BYTES)));
typedef int32_t Ints __attribute__((vector_size(ESPER_WIDE_BYTES)));
typedef uint32_t Bits __attribute__((vector_size(ESPER_WIDE_BYTES)));
typedef uint16_t Halves __attribute__((vector_size(ESPER_WIDE_BYTES / 2)));
constexpr int64_t kLanes = ESPER_WIDE_BYTES / sizeof(float);

template <typename To, typename From>
ESPER_INLINE void bits_as(const From& from, To& to) {
    static_assert(sizeof(To) == sizeof(From));
    std::memcpy(&to, &from, sizeof(to));
}

ESPER_INLINE void load(const float* x, Floats& lanes) {
    std::memcpy(&lanes, x, sizeof(lanes));
}
ESPER_INLINE void store(const Floats& lanes, float* x) {
    std::memcpy(x, &lanes, sizeof(lanes));
}

// One storage type: how kLanes elements become float lanes, and lanes elements, rounded to nearest even.
struct Float32 {
    using Storage = float;
    static ESPER_INLINE void read(const Storage* x, Floats& lanes) { load(x, lanes); }
    static ESPER_INLINE void write(const Floats& lanes, Storage* x) { store(lanes, x); }
};

struct BFloat16 {
    using Storage = uint16_t;
    static ESPER_INLINE void read(const Storage* x, Floats& lanes) {
        Halves raw;
        std::memcpy(&raw, x, sizeof(raw));
        bits_as(__builtin_convertvector(raw, Bits) << 16, lanes);  // the upper half of a float32
    }
    static ESPER_INLINE void write(const Floats& lanes, Storage* x) {
        Bits bits;
        bits_as(lanes, bits);
        const Bits rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        const Bits result = lanes == lanes ? rounded : (bits >> 16 | 0x40);  // rounding could turn a NaN into Inf
        const Halves halves = __builtin_convertvector(result, Halves);
        std::memcpy(x, &halves, sizeof(halves));
    }
};

struct Float16 {
    using Storage = uint16_t;
    static ESPER_INLINE void read(const Storage* x, Floats& lanes) {
        Halves raw;
        std::memcpy(&raw, x, sizeof(raw));
        const Bits wide = __builtin_convertvector(raw, Bits);
        const Bits magnitude = (wide & 0x7fff) << 13;  // exponent and mantissa in their float32 places
        // Subnormals have no hidden bit: add one at 2^-14 and subtract its value again.
        Floats subnormal;
        bits_as(magnitude + (113u << 23), subnormal);
        subnormal -= 0x1p-14f;
        Bits small;
        bits_as(subnormal, small);
        // Bias 15 to 127; Inf and NaN keep an exponent of all ones.
        const Bits normal = magnitude + (magnitude >= (31u << 23) ? Bits{} + (224u << 23) : Bits{} + (112u << 23));
        bits_as((magnitude < (1u << 23) ? small : normal) | (wide & 0x8000) << 16, lanes);
    }
    static ESPER_INLINE void write(const Floats& lanes, Storage* x) {
        Bits bits;
        bits_as(lanes, bits);
        const Bits magnitude = bits & 0x7fffffff;
        const Bits normal = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
        // Below 2^-14 the spacing is 2^-24, that of floats around 0.5: adding 0.5 rounds there.
        Floats shifted;
        bits_as(magnitude, shifted);
        shifted += 0.5f;
        Bits subnormal;
        bits_as(shifted, subnormal);
        subnormal -= 0x3f000000;
        Bits result = magnitude < (113u << 23) ? subnormal : normal;
        result = magnitude >= (143u << 23) ? Bits{} + 0x7c00 : result;  // 65536 and above, Inf
        result = magnitude > (255u << 23) ? Bits{} + 0x7e00 : result;   // NaN
        const Halves halves = __builtin_convertvector(result | (bits >> 16 & 0x8000), Halves);
        std::memcpy(x, &halves, sizeof(halves));
    }
};

// n elements, at most as many as `values` holds rounded up to whole lanes; the lanes past n get `padding`.
template <typename Type>
ESPER_INLINE void read_many(const typename Type::Storage* x, int64_t n, float padding, float* values) {
    Floats lanes;
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        Type::read(x + i, lanes);
        store(lanes, values + i);
    }
    if (i < n) {
        typename Type::Storage rest[kLanes] = {};
        std::memcpy(rest, x + i, static_cast<size_t>(n - i) * sizeof(rest[0]));
        Type::read(rest, lanes);
        store(lanes, values + i);
        for (int64_t k = n; k < i + kLanes; ++k) values[k] = padding;
    }
}

template <typename Type>
ESPER_INLINE void write_many(const float* values, int64_t n, typename Type::Storage* x) {
    Floats lanes;
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        load(values + i, lanes);
        Type::write(lanes, x + i);
    }
    if (i < n) {
        typename Type::Storage rest[kLanes];
        load(values + i, lanes);
        Type::write(lanes, rest);
        std::memcpy(x + i, rest, static_cast<size_t>(n - i) * sizeof(rest[0]));
    }
}

// exp of numbers up to 0, within 2 units in the last place; 0 below -87, where float32 ends; NaN stays NaN.
// exp(x) = 2^n * exp(r) with n the nearest integer to x / ln 2; the Taylor series of exp(r), |r| < 0.35, to r^7 leaves
// 6e-9.
ESPER_INLINE void exp_negative(const Floats& x, Floats& result) {
    constexpr float kRound = 0x1.8p23f;  // adding it leaves the nearest integer in the low bits
    const Floats inside = x < -87.0f ? Floats{} - 87.0f : x;
    const Floats shifted = inside * 0x1.715476p0f + kRound;
    const Floats n = shifted - kRound;
    // ln 2 in two parts; the first has few digits, so n times it is exact.
    const Floats r = (inside - n * 0x1.63p-1f) + n * 2.12194440e-4f;
    Floats series = r * (1.0f / 5040) + 1.0f / 720;
    series = series * r + 1.0f / 120;
    series = series * r + 1.0f / 24;
    series = series * r + 1.0f / 6;
    series = series * r + 0.5f;
    series = series * r + 1.0f;
    series = series * r + 1.0f;
    Bits power;
    bits_as(shifted, power);
    Floats scale;
    bits_as((power + 127) << 23, scale);
    result = x < -87.0f ? Floats{} : series * scale;
}

// log of normal positive numbers, within 2 units in the last place; NaN stays NaN.
// log(2^e * f) = e ln 2 + 2 atanh(z) with z = (f - 1) / (f + 1) and f in [0.7, 1.4]; the series to z^9 leaves 1e-9.
ESPER_INLINE void log_positive(const Floats& x, Floats& result) {
    Bits bits;
    bits_as(x, bits);
    const Bits offset = bits - 0x3f3504f3;  // from the bits of sqrt(1/2)
    Ints exponent;
    bits_as(offset, exponent);
    exponent >>= 23;
    Floats f;
    bits_as((offset & 0x7fffff) + 0x3f3504f3, f);
    const Floats z = (f - 1.0f) / (f + 1.0f);
    const Floats zz = z * z;
    Floats series = zz * (2.0f / 9) + 2.0f / 7;
    series = series * zz + 2.0f / 5;
    series = series * zz + 2.0f / 3;
    series = series * zz + 2.0f;
    const Floats e = __builtin_convertvector(exponent, Floats);
    const Floats value = e * 0x1.63p-1f + (series * z - e * 2.12194440e-4f);
    result = x == x ? value : x;
}

}  // namespace ESPER_WIDE_NAMESPACE
}  // namespace esper::wide
