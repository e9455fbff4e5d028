// The two passes of norm_relu_pool backward: sums over the channels, then the input's gradient.
#pragma once

#include <algorithm>

#include "norm_relu_pool_work.h"

namespace esper::norm_relu_pool {

// --- sums ----------------------------------------------------------------------------------------------------------

// The output's gradient masked by ReLU: g, without a pool.
template <typename Type>
ESPER_INLINE Group passed(const Group& gradient, const Group& value, const Group& scale, const Group& shift) {
    return Group{relu_gradient(gradient.a, normalised(value.a, scale.a, shift.a), Type::kRoundsToZero),
                 relu_gradient(gradient.b, normalised(value.b, scale.b, shift.b), Type::kRoundsToZero)};
}

// Sums over row pairs `begin` to `end` of g and g * (x - mean), g being the gradient of the normalisation's output.
// Windows add to the chains in turn. With the pool only one place of a window adds: the others would add 0, which
// changes no bit.
template <typename Type, typename Tile>
ESPER_INLINE void block_sums_pooled(const Work& work, const Tile& tile, int64_t begin, int64_t end) {
    using Storage = typename Type::Storage;
    const int64_t stride = work.shape.channels;
    const int64_t row = work.shape.width * stride;
    const int64_t windows = work.shape.width / 2;
    const Group mean = tile.read(work.channels->mean);
    Sums sums;
    for (int64_t p = begin; p < end; ++p) {
        const RowPair rows = row_pair(work.shape, p);
        if (!rows.both) continue;
        const auto* x = static_cast<const Storage*>(work.input) + rows.first * stride + tile.first;
        const auto* g = static_cast<const Storage*>(work.gradient) + rows.pooled * stride + tile.first;
        const uint8_t* c = work.choice + rows.pooled * stride + tile.first;
        const auto window = [&](int chain, int64_t j) __attribute__((always_inline)) {
            const Storage* corner = x + 2 * j * stride;
            const IntGroup choice = Type::load_bytes(c + j * stride, tile.where);
            const Columns upper = tile.template load_columns<Type>(corner, stride);
            const Columns lower = tile.template load_columns<Type>(corner + row, stride);
            Group taken = upper.left;
            const auto take = [&](const Group& value, int place) __attribute__((always_inline)) {
                taken.a = choice.a == place ? value.a : taken.a;
                taken.b = choice.b == place ? value.b : taken.b;
            };
            take(upper.right, 1);
            take(lower.left, 2);
            take(lower.right, 3);
            Group gradient = Type::load(g + j * stride, tile.where);
            gradient.a = choice.a == kDead ? Floats{} : gradient.a;
            gradient.b = choice.b == kDead ? Floats{} : gradient.b;
            sums.add(chain, gradient, gradient, Group{taken.a - mean.a, taken.b - mean.b});
        };
        int64_t j = 0;
        for (; j + 2 * Tile::kPixels <= windows; j += 2 * Tile::kPixels) {
            window(0, j);
            window(1, j + Tile::kPixels);
        }
        if (j < windows) window(0, j);
    }
    sums.write(tile, *work.channels);
}

// The same without the pool. Pixels outside all windows, which get no gradient from a later pool, come last.
template <typename Type, typename Tile>
ESPER_INLINE void block_sums_unpooled(const Work& work, const Tile& tile, int64_t begin, int64_t end) {
    using Storage = typename Type::Storage;
    const int64_t stride = work.shape.channels;
    const int64_t width = work.shape.width;
    const int64_t row = width * stride;
    const int64_t windows = width / 2;
    const Group mean = tile.read(work.channels->mean);
    const Group scale = tile.read(work.channels->scale);
    const Group shift = tile.read(work.channels->shift);
    Sums sums;
    for (int64_t p = begin; p < end; ++p) {
        const RowPair rows = row_pair(work.shape, p);
        const auto* x = static_cast<const Storage*>(work.input) + rows.first * stride + tile.first;
        const auto* g = static_cast<const Storage*>(work.gradient) + rows.first * stride + tile.first;
        const auto add = [&](int chain, const Group& value, const Group& output_gradient)
                             __attribute__((always_inline)) {
                                 const Group gradient = passed<Type>(output_gradient, value, scale, shift);
                                 sums.add(chain, gradient, gradient, Group{value.a - mean.a, value.b - mean.b});
                             };
        const auto columns = [&](int chain, int64_t at) __attribute__((always_inline)) {
            const Columns value = tile.template load_columns<Type>(x + at, stride);
            const Columns gradient = tile.template load_columns<Type>(g + at, stride);
            add(chain, value.left, gradient.left);
            add(chain, value.right, gradient.right);
        };
        const auto window = [&](int chain, int64_t j) __attribute__((always_inline)) {
            columns(chain, 2 * j * stride);
            if (rows.both) columns(chain, 2 * j * stride + row);
        };
        int64_t j = 0;
        for (; j + 2 * Tile::kPixels <= windows; j += 2 * Tile::kPixels) {
            window(0, j);
            window(1, j + Tile::kPixels);
        }
        if (j < windows) window(0, j);
        if (!Tile::kFlat && width % 2 != 0) {
            for (int64_t at = row - stride; at < (rows.both ? 2 * row : row); at += row) {
                add(0, Type::load(x + at, tile.where), Type::load(g + at, tile.where));
            }
        }
    }
    sums.write(tile, *work.channels);
}

template <typename Type>
ESPER_INLINE void sums_pass(const Work& work) {
    Channels& channels = *work.channels;
    const Shape& shape = work.shape;
    const int64_t pairs = shape.batch * row_pairs_per_image(shape);
    const int64_t step = std::max<int64_t>(1, kBlock / (2 * shape.width));
    for (int64_t begin = 0; begin < pairs; begin += step) {
        const int64_t end = std::min(begin + step, pairs);
        if (shape.pool) {
            for_tiles(shape, ESPER_TILE_BODY { block_sums_pooled<Type>(work, tile, begin, end); });
        } else {
            for_tiles(shape, ESPER_TILE_BODY { block_sums_unpooled<Type>(work, tile, begin, end); });
        }
        for (size_t lane = 0; lane < channels.count; ++lane) {
            channels.total[lane] += static_cast<double>(channels.sum[lane]);
            channels.total_other[lane] += static_cast<double>(channels.other[lane]);
        }
    }
}

// --- the input's gradient ------------------------------------------------------------------------------------------

// kBatch: the statistics were those of the batch, so gradients pass through them too.
template <bool kBatch>
struct InputGradient {
    template <typename Tile>
    ESPER_INLINE InputGradient(const Tile& tile, const Channels& channels)
        : mean(tile.read(channels.mean)),
          scale(tile.read(channels.scale)),
          slope(tile.read(channels.slope)),
          offset(tile.read(channels.offset)) {}
    Group mean, scale, slope, offset;

    ESPER_INLINE Group of(const Group& g, const Group& x) const {
        if constexpr (!kBatch) return Group{g.a * scale.a, g.b * scale.b};
        return Group{input_gradient(g.a, x.a, mean.a, scale.a, slope.a, offset.a),
                     input_gradient(g.b, x.b, mean.b, scale.b, slope.b, offset.b)};
    }
};

template <typename Type, bool kBatch, typename Tile>
ESPER_INLINE void gradient_rows_pooled(const Work& work, const Tile& tile, const RowPair& rows) {
    using Storage = typename Type::Storage;
    const int64_t stride = work.shape.channels;
    const int64_t width = work.shape.width;
    const int64_t row = width * stride;
    const auto* x = static_cast<const Storage*>(work.input) + rows.first * stride + tile.first;
    auto* dx = static_cast<Storage*>(work.result) + rows.first * stride + tile.first;
    const InputGradient<kBatch> gradients(tile, *work.channels);
    const auto columns = [&](int64_t at, const Group& left, const Group& right) __attribute__((always_inline)) {
        const Columns value = tile.template load_columns<Type>(x + at, stride);
        tile.template store_columns<Type>(dx + at, stride,
                                          Columns{gradients.of(left, value.left), gradients.of(right, value.right)});
    };
    if (rows.both) {
        const auto* g = static_cast<const Storage*>(work.gradient) + rows.pooled * stride + tile.first;
        const uint8_t* c = work.choice + rows.pooled * stride + tile.first;
        for (int64_t j = 0; j < width / 2; j += Tile::kPixels) {
            const Group gradient = Type::load(g + j * stride, tile.where);
            const IntGroup choice = Type::load_bytes(c + j * stride, tile.where);
            const auto route = [&](int place) __attribute__((always_inline)) {
                return Group{routed(gradient.a, choice.a, place), routed(gradient.b, choice.b, place)};
            };
            columns(2 * j * stride, route(0), route(1));
            columns(2 * j * stride + row, route(2), route(3));
        }
    } else {
        for (int64_t j = 0; j < width / 2; j += Tile::kPixels) columns(2 * j * stride, Group{}, Group{});
    }
    if (!Tile::kFlat && width % 2 != 0) {  // the last column has no window
        for (int64_t at = row - stride; at < (rows.both ? 2 * row : row); at += row) {
            Type::store(dx + at, gradients.of(Group{}, Type::load(x + at, tile.where)), tile.where);
        }
    }
}

template <typename Type, bool kBatch, typename Tile>
ESPER_INLINE void gradient_pixels(const Work& work, const Tile& tile, int64_t begin, int64_t end) {
    using Storage = typename Type::Storage;
    const int64_t stride = work.shape.channels;
    const auto* x = static_cast<const Storage*>(work.input) + tile.first;
    const auto* g = static_cast<const Storage*>(work.gradient) + tile.first;
    auto* dx = static_cast<Storage*>(work.result) + tile.first;
    const Group scale = tile.read(work.channels->scale);
    const Group shift = tile.read(work.channels->shift);
    const InputGradient<kBatch> gradients(tile, *work.channels);
    for (int64_t pixel = begin; pixel < end; pixel += Tile::kPixels) {
        const Group value = Type::load(x + pixel * stride, tile.where);
        const Group gradient = passed<Type>(Type::load(g + pixel * stride, tile.where), value, scale, shift);
        Type::store(dx + pixel * stride, gradients.of(gradient, value), tile.where);
    }
}

template <typename Type, bool kBatch>
ESPER_INLINE void gradient_pass(const Work& work) {
    const Shape& shape = work.shape;
    if (!shape.pool) {
        for (int64_t begin = 0; begin < shape.pixels(); begin += kBlock) {
            const int64_t end = std::min(begin + kBlock, shape.pixels());
            for_tiles(shape, ESPER_TILE_BODY { gradient_pixels<Type, kBatch>(work, tile, begin, end); });
        }
        return;
    }
    for (int64_t p = 0; p < shape.batch * row_pairs_per_image(shape); ++p) {
        const RowPair rows = row_pair(shape, p);
        for_tiles(shape, ESPER_TILE_BODY { gradient_rows_pooled<Type, kBatch>(work, tile, rows); });
    }
}

}  // namespace esper::norm_relu_pool
