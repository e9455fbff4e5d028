// Vectors of floats for the CPU kernels, and their compilation for several instruction sets, so that one build is fast
// on every x86-64 machine and runs on all of them.
//
// Everything marked ESPER_INLINE becomes part of its caller and is compiled for the caller's instruction set. Vectors
// are only ever local variables; memory is read and written through memcpy, so nothing needs to be aligned.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#pragma GCC diagnostic ignored "-Wpsabi"  // no function that takes or returns a vector is ever called, see above

#if defined(ESPER_ONE_LEVEL)
#define ESPER_INLINE inline
#else
#define ESPER_INLINE inline __attribute__((always_inline))
#endif

// ESPER_CLONES compiles a function once for each instruction set. ESPER_BY_WIDTH(signature, body) does the same with
// the width of the registers as `kBytes`: comparisons of wider vectors would be taken apart into single elements. The
// loader picks the version for the machine that it is on. Elsewhere, and with ESPER_ONE_LEVEL, there is one version.
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(ESPER_ONE_LEVEL)
#define ESPER_CPU_CLONES 1
#if !defined(__clang__) && __GNUC__ >= 12
// Levels of the architecture: AVX-512 with all its 256-bit forms, and AVX2 with fused multiply-add.
#define ESPER_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define ESPER_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#endif
#define ESPER_BY_WIDTH(signature, ...)              \
    __attribute__((target("avx512f"))) signature {  \
        constexpr int kBytes = 64;                  \
        __VA_ARGS__                                 \
    }                                               \
    __attribute__((target("avx2,fma"))) signature { \
        constexpr int kBytes = 32;                  \
        __VA_ARGS__                                 \
    }                                               \
    __attribute__((target("default"))) signature {  \
        constexpr int kBytes = 16;                  \
        __VA_ARGS__                                 \
    }
#else
#define ESPER_CLONES
#define ESPER_BY_WIDTH(signature, ...) \
    signature {                        \
        constexpr int kBytes = 16;     \
        __VA_ARGS__                    \
    }
#endif

namespace esper {

template <typename To, typename From>
ESPER_INLINE To bits_as(const From& from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
}

// One specialisation a width: GCC cannot make a vector type whose size is a template's argument.
template <int kBytes>
struct VectorTypes;
#define ESPER_VECTOR_TYPES(bytes)                                        \
    template <>                                                          \
    struct VectorTypes<bytes> {                                          \
        typedef float Floats __attribute__((vector_size(bytes)));        \
        typedef int32_t Ints __attribute__((vector_size(bytes)));        \
        typedef uint32_t Bits __attribute__((vector_size(bytes)));       \
        typedef uint16_t Halves __attribute__((vector_size(bytes / 2))); \
    }
ESPER_VECTOR_TYPES(16);
ESPER_VECTOR_TYPES(32);
ESPER_VECTOR_TYPES(64);

template <int kBytes>
struct Vectors {
    using Floats = typename VectorTypes<kBytes>::Floats;
    using Ints = typename VectorTypes<kBytes>::Ints;
    using Bits = typename VectorTypes<kBytes>::Bits;
    using Halves = typename VectorTypes<kBytes>::Halves;
    static constexpr int64_t kLanes = kBytes / sizeof(float);

    static ESPER_INLINE Floats load(const float* x) {
        Floats lanes;
        std::memcpy(&lanes, x, sizeof(lanes));
        return lanes;
    }
    static ESPER_INLINE void store(const Floats& lanes, float* x) { std::memcpy(x, &lanes, sizeof(lanes)); }
    static ESPER_INLINE Bits load_halves(const uint16_t* x) {
        Halves halves;
        std::memcpy(&halves, x, sizeof(halves));
        return __builtin_convertvector(halves, Bits);
    }
    static ESPER_INLINE void store_halves(const Bits& bits, uint16_t* x) {
        const Halves halves = __builtin_convertvector(bits, Halves);
        std::memcpy(x, &halves, sizeof(halves));
    }

    // exp of numbers up to 0, within 2 units in the last place; 0 below -87, near the smallest normal float32; NaN
    // stays NaN. exp(x) = 2^n * exp(r) with n the nearest integer to x / ln 2; the Taylor series of exp(r), |r| < 0.35,
    // to r^7 leaves 6e-9.
    static ESPER_INLINE Floats exp_negative(const Floats& x) {
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
        const Floats scale = bits_as<Floats>((bits_as<Bits>(shifted) + 127) << 23);
        return x < -87.0f ? Floats{} : series * scale;
    }

    // log of normal positive numbers, within 2 units in the last place; NaN stays NaN.
    // log(2^e * f) = e ln 2 + 2 atanh(z) with z = (f - 1) / (f + 1) and f in [0.7, 1.4]; the series to z^9 leaves 1e-9.
    static ESPER_INLINE Floats log_positive(const Floats& x) {
        const Bits offset = bits_as<Bits>(x) - 0x3f3504f3;  // from the bits of sqrt(1/2)
        const auto exponent = bits_as<Ints>(offset) >> 23;
        const Floats f = bits_as<Floats>((offset & 0x7fffff) + 0x3f3504f3);
        const Floats z = (f - 1.0f) / (f + 1.0f);
        const Floats zz = z * z;
        Floats series = zz * (2.0f / 9) + 2.0f / 7;
        series = series * zz + 2.0f / 5;
        series = series * zz + 2.0f / 3;
        series = series * zz + 2.0f;
        const Floats e = __builtin_convertvector(exponent, Floats);
        const Floats value = e * 0x1.63p-1f + (series * z - e * 2.12194440e-4f);
        return x == x ? value : x;
    }
};

// --- storage types: kLanes elements to float lanes, and lanes to elements, rounded to nearest even ------------------

template <int kBytes>
struct Float32 : Vectors<kBytes> {
    using Storage = float;
    using typename Vectors<kBytes>::Floats;
    static ESPER_INLINE Floats read(const Storage* x) { return Vectors<kBytes>::load(x); }
    static ESPER_INLINE void write(const Floats& lanes, Storage* x) { Vectors<kBytes>::store(lanes, x); }
};

template <int kBytes>
struct BFloat16 : Vectors<kBytes> {
    using Storage = uint16_t;
    using typename Vectors<kBytes>::Floats, typename Vectors<kBytes>::Bits;
    static ESPER_INLINE Floats read(const Storage* x) {
        return bits_as<Floats>(Vectors<kBytes>::load_halves(x) << 16);  // the upper half of a float32
    }
    static ESPER_INLINE void write(const Floats& lanes, Storage* x) {
        const Bits bits = bits_as<Bits>(lanes);
        const Bits rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        const Bits result = lanes == lanes ? rounded : (bits >> 16 | 0x40);  // rounding could turn a NaN into Inf
        Vectors<kBytes>::store_halves(result, x);
    }
};

template <int kBytes>
struct Float16 : Vectors<kBytes> {
    using Storage = uint16_t;
    using typename Vectors<kBytes>::Floats, typename Vectors<kBytes>::Bits;
    // The float32 bits of a magnitude that is in the lower 15 bits.
    static ESPER_INLINE Bits widened(const Bits& half) {
        const Bits magnitude = half << 13;  // exponent and mantissa in their float32 places
        // Subnormals have no hidden bit: add one at 2^-14 and subtract its value again.
        const Bits small = bits_as<Bits>(bits_as<Floats>(magnitude + (113u << 23)) - 0x1p-14f);
        // Bias 15 to 127; Inf and NaN keep an exponent of all ones.
        const Bits normal = magnitude + (magnitude >= (31u << 23) ? Bits{} + (224u << 23) : Bits{} + (112u << 23));
        return magnitude < (1u << 23) ? small : normal;
    }
    static ESPER_INLINE Floats read(const Storage* x) {
        const Bits half = Vectors<kBytes>::load_halves(x);
        return bits_as<Floats>(widened(half & 0x7fff) | (half & 0x8000) << 16);
    }
    static ESPER_INLINE void write(const Floats& lanes, Storage* x) {
        const Bits bits = bits_as<Bits>(lanes);
        const Bits magnitude = bits & 0x7fffffff;
        const Bits normal = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
        // Below 2^-14 the spacing is 2^-24, that of floats around 0.5: adding 0.5 rounds there.
        const Bits subnormal = bits_as<Bits>(bits_as<Floats>(magnitude) + 0.5f) - 0x3f000000;
        Bits result = magnitude < (113u << 23) ? subnormal : normal;
        result = magnitude >= (143u << 23) ? Bits{} + 0x7c00 : result;  // 65536 and above, Inf
        result = magnitude > (255u << 23) ? Bits{} + 0x7e00 : result;   // NaN
        Vectors<kBytes>::store_halves(result | (bits >> 16 & 0x8000), x);
    }
};

// Reads n elements into `values`, which has room for n rounded up to whole lanes; the lanes past n get `padding`.
template <typename Type>
ESPER_INLINE void read_many(const typename Type::Storage* x, int64_t n, float padding, float* values) {
    constexpr int64_t kLanes = Type::kLanes;
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) Type::store(Type::read(x + i), values + i);
    if (i < n) {
        typename Type::Storage rest[kLanes] = {};
        std::memcpy(rest, x + i, static_cast<size_t>(n - i) * sizeof(rest[0]));
        Type::store(Type::read(rest), values + i);
        for (int64_t l = n; l < i + kLanes; ++l) values[l] = padding;
    }
}

template <typename Type>
ESPER_INLINE void write_many(const float* values, int64_t n, typename Type::Storage* x) {
    constexpr int64_t kLanes = Type::kLanes;
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) Type::write(Type::load(values + i), x + i);
    if (i < n) {
        typename Type::Storage rest[kLanes];
        Type::write(Type::load(values + i), rest);
        std::memcpy(x + i, rest, static_cast<size_t>(n - i) * sizeof(rest[0]));
    }
}

}  // namespace esper
