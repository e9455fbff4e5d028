// Eight values at a time, whatever the storage type. Eight floats fill one register of AVX2, and channels, which come
// in multiples of eight, rarely fill more.
//
// Vectors are only ever local variables; memory is read and written through memcpy, so nothing needs to be aligned.
#pragma once

#include <cstdint>
#include <cstring>

#include "clones.h"

namespace esper {

constexpr int64_t kLanes = 8;

typedef float Floats __attribute__((vector_size(32)));
typedef int32_t Ints __attribute__((vector_size(32)));
typedef uint32_t Bits __attribute__((vector_size(32)));
typedef uint16_t Halves __attribute__((vector_size(16)));
typedef uint8_t Bytes __attribute__((vector_size(8)));

template <typename To, typename From>
ESPER_INLINE To bits_as(const From& from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
}

// Reads a vector; where it is not kWhole only the first `lanes` of it, and zeros after them.
template <typename Vector, bool kWhole, typename Element>
ESPER_INLINE Vector load_raw(const Element* x, int64_t lanes) {
    Vector raw{};
    static_assert(sizeof(raw) == kLanes * sizeof(Element));
    if constexpr (kWhole) {
        std::memcpy(&raw, x, sizeof(raw));
    } else {
        Element part[kLanes] = {};
        for (int64_t i = 0; i < lanes; ++i) part[i] = x[i];
        std::memcpy(&raw, part, sizeof(raw));
    }
    return raw;
}

template <typename Vector, bool kWhole, typename Element>
ESPER_INLINE void store_raw(Element* x, const Vector& raw, int64_t lanes) {
    if constexpr (kWhole) {
        std::memcpy(x, &raw, sizeof(raw));
    } else {
        Element part[kLanes];
        std::memcpy(part, &raw, sizeof(raw));
        for (int64_t i = 0; i < lanes; ++i) x[i] = part[i];
    }
}

// A storage type: its elements as floats, and floats rounded to what it can hold.
struct Float32Lanes {
    using Storage = float;
    static constexpr float kRoundsToZero = 0;  // the largest value that becomes zero in storage

    template <bool kWhole>
    static ESPER_INLINE Floats load(const Storage* x, int64_t lanes) {
        return load_raw<Floats, kWhole>(x, lanes);
    }
    template <bool kWhole>
    static ESPER_INLINE void store(Storage* x, const Floats& value, int64_t lanes) {
        store_raw<Floats, kWhole>(x, value, lanes);
    }
    template <bool kWhole>
    static ESPER_INLINE void store_rounded(Storage* x, const Floats& value, int64_t lanes) {
        store<kWhole>(x, value, lanes);
    }
    static ESPER_INLINE Floats rounded(const Floats& value) { return value; }
};

struct BFloat16Lanes {
    using Storage = uint16_t;
    static constexpr float kRoundsToZero = 0x1p-134f;  // half of the smallest

    template <bool kWhole>
    static ESPER_INLINE Floats load(const Storage* x, int64_t lanes) {
        const auto raw = load_raw<Halves, kWhole>(x, lanes);
        return bits_as<Floats>(__builtin_convertvector(raw, Bits) << 16);  // the upper half of a float32
    }
    // For values that `rounded` has returned.
    template <bool kWhole>
    static ESPER_INLINE void store_rounded(Storage* x, const Floats& value, int64_t lanes) {
        store_raw<Halves, kWhole>(x, __builtin_convertvector(bits_as<Bits>(value) >> 16, Halves), lanes);
    }
    template <bool kWhole>
    static ESPER_INLINE void store(Storage* x, const Floats& value, int64_t lanes) {
        store_raw<Halves, kWhole>(x, __builtin_convertvector(nearest(value) >> 16, Halves), lanes);
    }
    static ESPER_INLINE Floats rounded(const Floats& value) { return bits_as<Floats>(nearest(value) & 0xffff0000u); }

    // To the nearest, ties to even, in the upper half. A NaN stays one unless its lower half is full of ones, which no
    // arithmetic makes.
    static ESPER_INLINE Bits nearest(const Floats& value) {
        const Bits bits = bits_as<Bits>(value);
        return bits + 0x7fffu + ((bits >> 16) & 1u);
    }
};

}  // namespace esper
