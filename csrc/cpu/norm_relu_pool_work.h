// Division of the work of norm_relu_pool on the CPU: tiles of channels, pairs of rows, chains of sums.
#pragma once

#include <vector>

#include "../norm_relu_pool_arguments.h"
#include "norm_relu_pool_groups.h"

namespace esper::norm_relu_pool {

using namespace groups;

constexpr int64_t kBlock = 256;  // pixels of a float32 sum, approximately
constexpr int kChains = 2;       // sums kept apart, to hide the latency of additions

// Channels that are processed together, from `first` on: one group of elements.
template <typename Where, bool Flat = false>
struct Tile {
    // Two pixels of eight channels fill a group; in passes over windows, one of each of two neighbouring windows.
    static constexpr bool kFlat = Flat;
    static constexpr int64_t kPixels = Flat ? 2 : 1;
    int64_t first;
    Where where;

    // The two columns of a window in one row, or of two neighbouring windows.
    template <typename Type>
    ESPER_INLINE Columns load_columns(const typename Type::Storage* x, int64_t stride) const {
        if constexpr (Flat) {
            return Type::load_flat(x);
        } else {
            return Columns{Type::load(x, where), Type::load(x + stride, where)};
        }
    }
    template <typename Type>
    ESPER_INLINE void store_columns(typename Type::Storage* x, int64_t stride, const Columns& columns) const {
        if constexpr (Flat) {
            Type::store_flat(x, columns);
        } else {
            Type::store(x, columns.left, where);
            Type::store(x + stride, columns.right, where);
        }
    }
    // Per-channel floats of this tile, which are kept in lanes.
    ESPER_INLINE Group read(const std::vector<float>& channels) const {
        return load_floats(channels.data() + first, Whole{});
    }
    ESPER_INLINE void write(std::vector<float>& channels, const Group& group) const {
        store_floats(channels.data() + first, group, Whole{});
    }
};

// Whether groups are made of two pixels. Then windows come in twos as well.
inline bool is_flat(const Shape& shape) {
    return shape.channels == kHalf && shape.width % 4 == 0;
}

template <typename Body>
ESPER_INLINE void for_tiles(const Shape& shape, const Body& body) {
    if (is_flat(shape)) return body(Tile<Whole, true>{0, {}});
    int64_t c = 0;
    for (; c + kGroup <= shape.channels; c += kGroup) body(Tile<Whole>{c, {}});
    if (shape.channels - c == kHalf) {
        body(Tile<First8>{c, {}});
    } else if (c < shape.channels) {
        body(Tile<Some>{c, {shape.channels - c}});
    }
}

#define ESPER_TILE_BODY [&](const auto& tile) __attribute__((always_inline))

// Per-channel values of a pass in lanes, L of them: whole groups.
struct Channels {
    explicit Channels(const Shape& shape)
        : flat(is_flat(shape)), count(static_cast<size_t>((shape.channels + kGroup - 1) / kGroup * kGroup)) {}

    bool flat;
    size_t count;                                                           // L
    std::vector<float> pivot = floats(), sum = floats(), other = floats();  // of one block
    std::vector<float> mean = floats(), scale = floats(), shift = floats(), slope = floats(), offset = floats();
    std::vector<double> total = doubles(), total_other = doubles();  // of all blocks

    // Lane of the channel, in the first pixel of a group (0) or in the second (1).
    size_t lane(ScalarType dtype, int64_t channel, int64_t pixel = 0) const {
        const int64_t element = channel % kGroup + pixel * kHalf;
        const int64_t lane =
            dtype == ScalarType::Float ? Float32Lanes::lane_of(element) : BFloat16Lanes::lane_of(element);
        return static_cast<size_t>(channel / kGroup * kGroup + lane);
    }
    void set(std::vector<float>& values, ScalarType dtype, int64_t channel, float value) const {
        values[lane(dtype, channel)] = value;
        if (flat) values[lane(dtype, channel, 1)] = value;
    }

 private:
    std::vector<float> floats() const { return std::vector<float>(count); }
    std::vector<double> doubles() const { return std::vector<double>(count); }
};

// Arguments of a pass; those that it does not use are null.
struct Work {
    Shape shape;
    bool batch_statistics;
    const void* input;     // [N, H, W, C]
    const void* gradient;  // [N, OH, OW, C] of the output
    void* result;          // [N, OH, OW, C], or [N, H, W, C] for the input's gradient
    uint8_t* choice;       // [N, OH, OW, C]
    Channels* channels;
};

// Rows 2i and 2i + 1 of one image, and their pooled row.
struct RowPair {
    int64_t first;   // pixel where the first row starts
    int64_t pooled;  // output pixel where the pooled row starts
    bool both;       // false for the last row of an odd height
};

ESPER_INLINE int64_t row_pairs_per_image(const Shape& shape) {
    return (shape.height + 1) / 2;
}

ESPER_INLINE RowPair row_pair(const Shape& shape, int64_t index) {
    const int64_t image = index / row_pairs_per_image(shape);
    const int64_t pair = index % row_pairs_per_image(shape);
    return RowPair{(image * shape.height + 2 * pair) * shape.width,
                   (image * (shape.height / 2) + pair) * (shape.width / 2), 2 * pair + 1 < shape.height};
}

// Two sums over many elements, in chains that are joined at the end.
struct Sums {
    Group first[kChains] = {};
    Group second[kChains] = {};

    ESPER_INLINE void add(int chain, const Group& one, const Group& factor, const Group& other) {
        first[chain].a += one.a;
        first[chain].b += one.b;
        second[chain].a += factor.a * other.a;
        second[chain].b += factor.b * other.b;
    }
    template <typename Tile>
    ESPER_INLINE void write(const Tile& tile, Channels& channels) const {
        tile.write(channels.sum, Group{first[0].a + first[1].a, first[0].b + first[1].b});
        tile.write(channels.other, Group{second[0].a + second[1].a, second[0].b + second[1].b});
    }
};

}  // namespace esper::norm_relu_pool
