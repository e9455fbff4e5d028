// Storage types of single elements: the type Math that is computed with, and conversions, for plain loops that the
// compiler turns into vectors.
#pragma once

#include "simd.h"

namespace esper {

template <typename T>
struct UnchangedElement {
    using Storage = T;
    using Math = T;
    static ESPER_INLINE T value(T x) { return x; }
    static ESPER_INLINE T storage(T x) { return x; }
};

struct BFloat16Element {
    using Storage = uint16_t;
    using Math = float;
    static ESPER_INLINE float value(uint16_t x) {
        return bits_as<float>(static_cast<uint32_t>(x) << 16);  // the upper half of a float32
    }
    // To the nearest, ties to even.
    static ESPER_INLINE uint16_t storage(float x) {
        const auto bits = bits_as<uint32_t>(x);
        const uint32_t nearest = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        return static_cast<uint16_t>(x != x ? 0x7fc0u : nearest);
    }
};

}  // namespace esper
