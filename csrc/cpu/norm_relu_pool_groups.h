// Sixteen elements at a time, whatever the storage type: a Group is two vectors of eight floats, each of which fills
// one register of AVX2.
//
// The order of the lanes depends on the storage type, because bfloat16 is cheapest to take apart into its even and its
// odd elements: a shift and a mask, without moving anything between lanes. Element e of a group is in lane lane_of(e),
// counted through both vectors. Vectors are only ever local variables; memory is read and written through memcpy, so
// nothing needs to be aligned.
#pragma once

#include "simd.h"

namespace esper::groups {

constexpr int64_t kHalf = 8;    // floats in a vector
constexpr int64_t kGroup = 16;  // elements in a group

using Floats = Vectors<32>::Floats;
using Ints = Vectors<32>::Ints;
using Bits = Vectors<32>::Bits;
using Halves = Vectors<32>::Halves;
typedef uint64_t Words __attribute__((vector_size(32)));
typedef uint64_t WordPair __attribute__((vector_size(16)));

struct Group {
    Floats a;
    Floats b;
};

struct IntGroup {
    Ints a;
    Ints b;
};

// The elements of a group that are in memory: all, the first eight, or another number. The others are zero.
struct Whole {};
struct First8 {};
struct Some {
    int64_t count;
};

template <typename Raw, typename Element>
ESPER_INLINE Raw load_raw(const Element* x, const Whole&) {
    static_assert(sizeof(Raw) == kGroup * sizeof(Element));
    Raw raw;
    std::memcpy(&raw, x, sizeof(raw));
    return raw;
}
template <typename Raw, typename Element>
ESPER_INLINE Raw load_raw(const Element* x, const First8&) {
    // Made of 64-bit words: a vector that was written in halves cannot be read as one without a stall.
    uint64_t words[2] = {};
    std::memcpy(words, x, sizeof(Raw) / 2);
    if constexpr (sizeof(Raw) == sizeof(WordPair)) {
        return bits_as<Raw>(WordPair{words[0], 0});
    } else {
        return bits_as<Raw>(Words{words[0], words[1], 0, 0});
    }
}
template <typename Raw, typename Element>
ESPER_INLINE Raw load_raw(const Element* x, const Some& where) {
    Element elements[kGroup] = {};
    for (int64_t i = 0; i < where.count; ++i) elements[i] = x[i];
    return bits_as<Raw>(elements);
}

template <typename Raw, typename Element>
ESPER_INLINE void store_raw(Element* x, const Raw& raw, const Whole&) {
    std::memcpy(x, &raw, sizeof(raw));
}
template <typename Raw, typename Element>
ESPER_INLINE void store_raw(Element* x, const Raw& raw, const First8&) {
    std::memcpy(x, &raw, sizeof(raw) / 2);
}
template <typename Raw, typename Element>
ESPER_INLINE void store_raw(Element* x, const Raw& raw, const Some& where) {
    Element elements[kGroup];
    std::memcpy(elements, &raw, sizeof(raw));
    for (int64_t i = 0; i < where.count; ++i) x[i] = elements[i];
}

// The first halves of two vectors, or their second halves.
ESPER_INLINE Bits first_halves(const Bits& x, const Bits& y) {
#if defined(__clang__)
    return __builtin_shufflevector(x, y, 0, 1, 2, 3, 8, 9, 10, 11);
#else
    return __builtin_shuffle(x, y, Bits{0, 1, 2, 3, 8, 9, 10, 11});
#endif
}
ESPER_INLINE Bits second_halves(const Bits& x, const Bits& y) {
#if defined(__clang__)
    return __builtin_shufflevector(x, y, 4, 5, 6, 7, 12, 13, 14, 15);
#else
    return __builtin_shuffle(x, y, Bits{4, 5, 6, 7, 12, 13, 14, 15});
#endif
}

// Two neighbours of each of eight channels. In a flat pair the left group holds the first and the third of four pixels,
// the right one the second and the fourth.
struct Columns {
    Group left;
    Group right;
};

// Floats vector by vector: one copy of both would be made in smaller parts, and reading those as a vector stalls.
ESPER_INLINE Group load_floats(const float* x, const Whole&) {
    Group group;
    std::memcpy(&group.a, x, sizeof(group.a));
    std::memcpy(&group.b, x + kHalf, sizeof(group.b));
    return group;
}
ESPER_INLINE Group load_floats(const float* x, const First8&) {
    Group group{};
    std::memcpy(&group.a, x, sizeof(group.a));
    return group;
}
ESPER_INLINE Group load_floats(const float* x, const Some& where) {
    return load_raw<Group>(x, where);
}

ESPER_INLINE void store_floats(float* x, const Group& group, const Whole&) {
    std::memcpy(x, &group.a, sizeof(group.a));
    std::memcpy(x + kHalf, &group.b, sizeof(group.b));
}
ESPER_INLINE void store_floats(float* x, const Group& group, const First8&) {
    std::memcpy(x, &group.a, sizeof(group.a));
}
ESPER_INLINE void store_floats(float* x, const Group& group, const Some& where) {
    store_raw(x, group, where);
}

struct Float32Lanes {
    using Storage = float;
    static constexpr float kRoundsToZero = 0;  // the largest value that becomes zero in storage
    static constexpr int64_t lane_of(int64_t element) { return element; }

    template <typename Where>
    static ESPER_INLINE Group load(const Storage* x, const Where& where) {
        return load_floats(x, where);
    }
    template <typename Where>
    static ESPER_INLINE void store(Storage* x, const Group& group, const Where& where) {
        store_floats(x, group, where);
    }
    template <typename Where>
    static ESPER_INLINE void store_rounded(Storage* x, const Group& group, const Where& where) {
        store(x, group, where);
    }
    static ESPER_INLINE Floats rounded(const Floats& value) { return value; }

    // Four pixels of eight channels.
    static ESPER_INLINE Columns load_flat(const Storage* x) {
        const Group first = load(x, Whole{});
        const Group second = load(x + kGroup, Whole{});
        return Columns{{first.a, second.a}, {first.b, second.b}};
    }
    static ESPER_INLINE void store_flat(Storage* x, const Columns& columns) {
        store(x, Group{columns.left.a, columns.right.a}, Whole{});
        store(x + kGroup, Group{columns.left.b, columns.right.b}, Whole{});
    }

    struct ByteRaw {
        uint64_t halves[2];
    };
    // Sixteen bytes, in this type's order of lanes.
    template <typename Where>
    static ESPER_INLINE IntGroup load_bytes(const uint8_t* x, const Where& where) {
        const auto raw = load_raw<ByteRaw>(x, where);
        return IntGroup{widened(raw.halves[0]), widened(raw.halves[1])};
    }
    template <typename Where>
    static ESPER_INLINE void store_bytes(uint8_t* x, const IntGroup& group, const Where& where) {
        store_raw(x, ByteRaw{{narrowed(group.a), narrowed(group.b)}}, where);
    }

 private:
    typedef uint8_t Bytes __attribute__((vector_size(8)));
    static ESPER_INLINE Ints widened(uint64_t bytes) { return __builtin_convertvector(bits_as<Bytes>(bytes), Ints); }
    static ESPER_INLINE uint64_t narrowed(const Ints& ints) {
        return bits_as<uint64_t>(__builtin_convertvector(ints, Bytes));
    }
};

struct BFloat16Lanes {
    using Storage = uint16_t;
    static constexpr float kRoundsToZero = 0x1p-134f;  // half of the smallest
    static constexpr int64_t lane_of(int64_t element) { return element % 2 * kHalf + element / 2; }

    template <typename Where>
    static ESPER_INLINE Group load(const Storage* x, const Where& where) {
        return taken_apart(load_raw<Bits>(x, where));
    }
    template <typename Where>
    static ESPER_INLINE void store(Storage* x, const Group& group, const Where& where) {
        store_raw(x, put_together(group), where);
    }
    // Stores values that `rounded` has returned.
    template <typename Where>
    static ESPER_INLINE void store_rounded(Storage* x, const Group& group, const Where& where) {
        store_raw(x, (bits_as<Bits>(group.a) >> 16) | bits_as<Bits>(group.b), where);
    }
    static ESPER_INLINE Floats rounded(const Floats& value) { return bits_as<Floats>(nearest(value) & 0xffff0000u); }

    // Four pixels of eight channels.
    static ESPER_INLINE Columns load_flat(const Storage* x) {
        const auto first = load_raw<Bits>(x, Whole{});
        const auto second = load_raw<Bits>(x + kGroup, Whole{});
        return Columns{taken_apart(first_halves(first, second)), taken_apart(second_halves(first, second))};
    }
    static ESPER_INLINE void store_flat(Storage* x, const Columns& columns) {
        const Bits left = put_together(columns.left);
        const Bits right = put_together(columns.right);
        store_raw(x, first_halves(left, right), Whole{});
        store_raw(x + kGroup, second_halves(left, right), Whole{});
    }

    // Bytes lie in pairs too: even ones in the lower byte of 16 bits, odd ones in the upper.
    template <typename Where>
    static ESPER_INLINE IntGroup load_bytes(const uint8_t* x, const Where& where) {
        const Ints pairs = __builtin_convertvector(load_raw<Halves>(x, where), Ints);
        return IntGroup{pairs & 255, pairs >> 8};
    }
    template <typename Where>
    static ESPER_INLINE void store_bytes(uint8_t* x, const IntGroup& group, const Where& where) {
        store_raw(x, __builtin_convertvector(group.a | (group.b << 8), Halves), where);
    }

 private:
    // A bfloat16 is the upper half of a float32; the even one of each two lies in the lower half of 32 bits.
    static ESPER_INLINE Group taken_apart(const Bits& raw) {
        return Group{bits_as<Floats>(raw << 16), bits_as<Floats>(raw & 0xffff0000u)};
    }
    static ESPER_INLINE Bits put_together(const Group& group) {
        return (nearest(group.a) >> 16) | (nearest(group.b) & 0xffff0000u);
    }
    // To the nearest, ties to even, in the upper half. A NaN stays one unless its lower half is full of ones, which
    // arithmetic on bfloat16 never makes.
    static ESPER_INLINE Bits nearest(const Floats& value) {
        const Bits bits = bits_as<Bits>(value);
        return bits + 0x7fffu + ((bits >> 16) & 1u);
    }
};

}  // namespace esper::groups
