// The two passes of norm_relu_pool forward: statistics, then normalisation, ReLU and pool.
#pragma once

#include <algorithm>

#include "norm_relu_pool_work.h"

namespace esper::norm_relu_pool {

// --- statistics ----------------------------------------------------------------------------------------------------

// Sums of the distances to the pivot, and of their squares, over `count` pixels; in a flat tile over count / 2 of each
// kind.
template <typename Type, typename Tile>
ESPER_INLINE void block_moments(const Work& work, const Tile& tile, int64_t begin, int64_t count) {
    const int64_t stride = work.shape.channels;
    const auto* x = static_cast<const typename Type::Storage*>(work.input) + begin * stride + tile.first;
    const Group pivot = tile.read(work.channels->pivot);
    Sums sums;
    const auto add = [&](int chain, int64_t pixel) __attribute__((always_inline)) {
        const Group value = Type::load(x + pixel * stride, tile.where);
        const Group d{value.a - pivot.a, value.b - pivot.b};
        sums.add(chain, d, d, d);
    };
    int64_t pixel = 0;
    for (; pixel + 2 * Tile::kPixels <= count; pixel += 2 * Tile::kPixels) {
        add(0, pixel);
        add(1, pixel + Tile::kPixels);
    }
    if (pixel < count) add(0, pixel);
    sums.write(tile, *work.channels);
}

// Joins the sums of a block of n values a lane to the mean and m2 of all before. The pivot of the next block is the
// mean so far: a block far from it adds as much to m2 as its own sums can lose.
ESPER_INLINE void join_block(Channels& channels, double n, double before) {
    const double part = n / (before + n);
    for (size_t lane = 0; lane < channels.count; ++lane) {
        const Moments block = moments_of(n, channels.pivot[lane], channels.sum[lane], channels.other[lane]);
        const double distance = block.mean - channels.total[lane];
        channels.total[lane] += distance * part;
        channels.total_other[lane] += block.m2 + distance * distance * before * part;
        channels.pivot[lane] = static_cast<float>(channels.total[lane]);
    }
}

// Mean and m2 of every lane into `total` and `total_other`. The first block is read twice: for its pivot, and with it.
template <typename Type>
ESPER_INLINE void statistics_pass(const Work& work) {
    Channels& channels = *work.channels;
    const int64_t pixels = work.shape.pixels();
    const int64_t pixels_per_group = channels.flat ? 2 : 1;
    const auto block = [&](int64_t begin) __attribute__((always_inline)) {
        const int64_t count = std::min(kBlock, pixels - begin);
        for_tiles(work.shape, ESPER_TILE_BODY { block_moments<Type>(work, tile, begin, count); });
        return static_cast<double>(count / pixels_per_group);
    };
    const double first = block(0);
    for (size_t lane = 0; lane < channels.count; ++lane) {
        channels.pivot[lane] = static_cast<float>(channels.sum[lane] / first);
    }
    for (int64_t begin = 0; begin < pixels; begin += kBlock) {
        const double count = block(begin);
        join_block(channels, count, static_cast<double>(begin / pixels_per_group));
    }
}

// --- normalisation, ReLU and pool ----------------------------------------------------------------------------------

ESPER_INLINE Group activated(const Group& value, const Group& scale, const Group& shift) {
    return Group{relu(normalised(value.a, scale.a, shift.a)), relu(normalised(value.b, scale.b, shift.b))};
}

// Pixels `begin` to `end`, without a pool.
template <typename Type, typename Tile>
ESPER_INLINE void forward_pixels(const Work& work, const Tile& tile, int64_t begin, int64_t end) {
    using Storage = typename Type::Storage;
    const int64_t stride = work.shape.channels;
    const auto* x = static_cast<const Storage*>(work.input) + tile.first;
    auto* y = static_cast<Storage*>(work.result) + tile.first;
    const Group scale = tile.read(work.channels->scale);
    const Group shift = tile.read(work.channels->shift);
    for (int64_t pixel = begin; pixel < end; pixel += Tile::kPixels) {
        const Group value = Type::load(x + pixel * stride, tile.where);
        Type::store(y + pixel * stride, activated(value, scale, shift), tile.where);
    }
}

// One row of pooled outputs.
template <typename Type, typename Tile>
ESPER_INLINE void forward_pooled_row(const Work& work, const Tile& tile, const RowPair& rows) {
    using Storage = typename Type::Storage;
    const int64_t stride = work.shape.channels;
    const int64_t row = work.shape.width * stride;
    const auto* x = static_cast<const Storage*>(work.input) + rows.first * stride + tile.first;
    auto* y = static_cast<Storage*>(work.result) + rows.pooled * stride + tile.first;
    uint8_t* c = work.choice + rows.pooled * stride + tile.first;
    const Group scale = tile.read(work.channels->scale);
    const Group shift = tile.read(work.channels->shift);
    const auto rounded = [&](const Group& input) __attribute__((always_inline)) {
        const Group value = activated(input, scale, shift);
        return Group{Type::rounded(value.a), Type::rounded(value.b)};
    };
    for (int64_t j = 0; j < work.shape.width / 2; j += Tile::kPixels) {
        const Storage* corner = x + 2 * j * stride;
        const Columns upper = tile.template load_columns<Type>(corner, stride);
        const Columns lower = tile.template load_columns<Type>(corner + row, stride);
        Group best = rounded(upper.left);
        IntGroup choice{};
        const auto look = [&](const Group& input, int place) __attribute__((always_inline)) {
            const Group value = rounded(input);
            choose(best.a, choice.a, value.a, place);
            choose(best.b, choice.b, value.b, place);
        };
        look(upper.right, 1);
        look(lower.left, 2);
        look(lower.right, 3);
        Type::store_rounded(y + j * stride, best, tile.where);
        const IntGroup alive{alive_choice(best.a, choice.a), alive_choice(best.b, choice.b)};
        Type::store_bytes(c + j * stride, alive, tile.where);
    }
}

template <typename Type>
ESPER_INLINE void forward_pass(const Work& work) {
    const Shape& shape = work.shape;
    if (!shape.pool) {
        for (int64_t begin = 0; begin < shape.pixels(); begin += kBlock) {
            const int64_t end = std::min(begin + kBlock, shape.pixels());
            for_tiles(shape, ESPER_TILE_BODY { forward_pixels<Type>(work, tile, begin, end); });
        }
        return;
    }
    for (int64_t p = 0; p < shape.batch * row_pairs_per_image(shape); ++p) {
        const RowPair rows = row_pair(shape, p);
        if (!rows.both) continue;
        for_tiles(shape, ESPER_TILE_BODY { forward_pooled_row<Type>(work, tile, rows); });
    }
}

}  // namespace esper::norm_relu_pool
