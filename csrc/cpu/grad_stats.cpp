// Gradient statistics on the CPU.
//
// Policy: memory is read once. Each block of 2048 elements is summed in float32 vectors, which is safe for nearly every
// gradient; a block whose sum leaves the range where float32 can be trusted is read again in float64, and only then
// are NaN and Inf counted (a finite sum proves there are none). Block sums are added in float64, in order, so the
// result has the same bits whether one thread ran or many.
#include <torch/csrc/stable/library.h>

#include "../grad_stats_arguments.h"
#include "parallel.h"
#include "simd.h"
#include "step.h"

namespace esper::grad_stats {
namespace {

constexpr int64_t kBlock = 2048;

// 16 lanes for every instruction set: the bits of a sum depend on their number.
constexpr int kBytes = 64;
using Floats = Vectors<kBytes>::Floats;
using Ints = Vectors<kBytes>::Ints;
using Bits = Vectors<kBytes>::Bits;
typedef double Doubles __attribute__((vector_size(kBytes)));
typedef int64_t Longs __attribute__((vector_size(kBytes)));
constexpr int64_t kLanes = Vectors<kBytes>::kLanes;

// Without the sign, which squares, zeros, NaN and Inf do not need.
struct Float16Magnitude : Float16<kBytes> {
    static ESPER_INLINE Floats read(const Storage* x) {
        return bits_as<Floats>(widened(Vectors<kBytes>::load_halves(x) & 0x7fff));
    }
};

struct FastSum {
    float sum_sq;
    int32_t zero;
};

// float32 sum of squares and count of zeros of max kBlock elements.
template <typename Type>
ESPER_INLINE FastSum fast_sum(const typename Type::Storage* x, int64_t n) {
    // Four chains hide the latency of the additions; 2048 elements are 32 additions a lane.
    Floats sum[4] = {};
    Ints zeros[4] = {};
    const auto add = [&](int chain, const typename Type::Storage* at) __attribute__((always_inline)) {
        const Floats value = Type::read(at);
        sum[chain] += value * value;
        zeros[chain] -= (bits_as<Bits>(value) << 1) == 0;  // on the bits, so that a flush-to-zero mode changes no count
    };
    int64_t i = 0;
    for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
        for (int k = 0; k < 4; ++k) add(k, x + i + k * kLanes);
    }
    for (; i + kLanes <= n; i += kLanes) add(0, x + i);
    int32_t padding = 0;
    if (i < n) {
        typename Type::Storage rest[kLanes] = {};
        std::memcpy(rest, x + i, static_cast<size_t>(n - i) * sizeof(rest[0]));
        add(0, rest);
        padding = static_cast<int32_t>(kLanes - (n - i));
    }
    const Floats lanes = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    const Ints counts = (zeros[0] + zeros[1]) + (zeros[2] + zeros[3]);
    float pair[8];
    for (int l = 0; l < 8; ++l) pair[l] = lanes[l] + lanes[l + 8];
    FastSum result{((pair[0] + pair[4]) + (pair[1] + pair[5])) + ((pair[2] + pair[6]) + (pair[3] + pair[7])), -padding};
    for (int l = 0; l < kLanes; ++l) result.zero += counts[l];
    return result;
}

ESPER_CLONES FastSum fast_sum_float32(const float* x, int64_t n) {
    return fast_sum<Float32<kBytes>>(x, n);
}
ESPER_CLONES FastSum fast_sum_bfloat16(const uint16_t* x, int64_t n) {
    return fast_sum<BFloat16<kBytes>>(x, n);
}
ESPER_CLONES FastSum fast_sum_float16(const uint16_t* x, int64_t n) {
    return fast_sum<Float16Magnitude>(x, n);
}

// One block of a 16- or 32-bit type: trust the float32 sum, or sum again in float64.
template <typename Type>
Totals block(const typename Type::Storage* x, int64_t n, FastSum (*fast)(const typename Type::Storage*, int64_t)) {
    const FastSum sum = fast(x, n);
    Totals totals{sum.sum_sq, 0, 0, static_cast<double>(sum.zero), static_cast<double>(n)};
    const bool trusted = sum.sum_sq >= kTrustedMin && sum.sum_sq <= kTrustedMax;  // false for NaN
    if (!trusted && sum.zero != n) {
        totals.sum_sq = 0;
        float values[kBlock];
        read_many<Type>(x, n, 0.0f, values);
        for (int64_t i = 0; i < n; ++i) add_element(totals, static_cast<double>(values[i]));
    }
    return totals;
}

ESPER_CLONES void fast_sum_float64(const double* x, int64_t n, double* sum_sq, int64_t* zero) {
    Doubles sum[4] = {};
    Longs zeros[4] = {};
    int64_t i = 0;
    for (; i + 32 <= n; i += 32) {
        for (int k = 0; k < 4; ++k) {
            Doubles value;
            std::memcpy(&value, x + i + k * 8, sizeof(value));
            sum[k] += value * value;
            zeros[k] -= (bits_as<Longs>(value) << 1) == 0;
        }
    }
    const Doubles lanes = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    const Longs counts = (zeros[0] + zeros[1]) + (zeros[2] + zeros[3]);
    *sum_sq = ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5])) + ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7]));
    *zero = 0;
    for (int l = 0; l < 8; ++l) *zero += counts[l];
    for (; i < n; ++i) {
        *sum_sq += x[i] * x[i];
        *zero += (bits_as<uint64_t>(x[i]) << 1) == 0;
    }
}

// float64 is summed as it is; only the counts of a non-finite block need a second pass.
Totals block_float64(const double* x, int64_t n) {
    int64_t zero = 0;
    Totals totals{0, 0, 0, 0, static_cast<double>(n)};
    fast_sum_float64(x, n, &totals.sum_sq, &zero);
    totals.zero = static_cast<double>(zero);
    if (!std::isfinite(totals.sum_sq)) {
        totals.sum_sq = 0;
        for (int64_t i = 0; i < n; ++i) add_element(totals, x[i]);
    }
    return totals;
}

// Block number `index` of a gradient.
Totals gradient_block(const Gradient& gradient, int64_t index) {
    const int64_t start = index * kBlock;
    const int64_t n = std::min(kBlock, gradient.elements - start);
    const auto* halves = static_cast<const uint16_t*>(gradient.data) + start;
    switch (gradient.dtype) {
        case Dtype::kFloat32:
            return block<Float32<kBytes>>(static_cast<const float*>(gradient.data) + start, n, fast_sum_float32);
        case Dtype::kBFloat16:
            return block<BFloat16<kBytes>>(halves, n, fast_sum_bfloat16);
        case Dtype::kFloat16:
            return block<Float16Magnitude>(halves, n, fast_sum_float16);
        default:
            return block_float64(static_cast<const double*>(gradient.data) + start, n);
    }
}

int64_t block_count(const Gradient& gradient) {
    return (gradient.elements + kBlock - 1) / kBlock;
}

// All blocks of all gradients [B]; a block does not depend on its thread.
std::vector<Totals> all_blocks(const std::vector<Gradient>& gradients) {
    std::vector<int64_t> first(gradients.size() + 1, 0);  // [N + 1] first block of each gradient
    int64_t elements = 0;
    for (size_t n = 0; n < gradients.size(); ++n) {
        first[n + 1] = first[n] + block_count(gradients[n]);
        elements += gradients[n].elements;
    }
    std::vector<Totals> blocks(static_cast<size_t>(first.back()));
    for_parts(first.back(), elements, [&](int64_t begin, int64_t end) {
        size_t n = static_cast<size_t>(std::upper_bound(first.begin(), first.end(), begin) - first.begin()) - 1;
        for (int64_t b = begin; b < end; ++b) {
            while (b >= first[n + 1]) ++n;
            blocks[static_cast<size_t>(b)] = gradient_block(gradients[n], b - first[n]);
        }
    });
    return blocks;
}

}  // namespace

void compute(const Arguments& arguments, double* fields, double* norms) {
    const std::vector<Totals> blocks = all_blocks(arguments.gradients);
    size_t n = 0, b = 0;
    for (size_t g = 0; g < arguments.group_sizes.size(); ++g) {
        GroupTotals group = empty_group();
        for (int64_t left = arguments.group_sizes[g]; left > 0; --left, ++n) {
            Totals tensor{0, 0, 0, 0, 0};
            for (int64_t i = block_count(arguments.gradients[n]); i > 0; --i) add(tensor, blocks[b++]);
            norms[n] = std::sqrt(tensor.sum_sq);
            add_tensor(group, tensor, arguments.exploding_norm);
        }
        write_fields(group, arguments.max_norm, fields + g * kFieldCount);
    }
}

namespace {

void grad_stats(StableIValue* stack, uint64_t, uint64_t) {
    const Arguments arguments = read_arguments(stack, nullptr);
    auto [fields, norms] = new_outputs(arguments);
    compute(arguments, checked_float64(fields.get(), "fields", arguments.device),
            checked_float64(norms.get(), "norms", arguments.device));
    stack[0] = give_tensor(std::move(fields));
    stack[1] = give_tensor(std::move(norms));
}

void grad_stats_out(StableIValue* stack, uint64_t, uint64_t) {
    const Outputs outputs = take_outputs(stack);
    const Arguments arguments = read_arguments(stack, outputs.fields.get());
    check_output_sizes(arguments, outputs);
    compute(arguments, checked_float64(outputs.fields.get(), "fields", arguments.device),
            checked_float64(outputs.norms.get(), "norms", arguments.device));
}

}  // namespace
}  // namespace esper::grad_stats

STABLE_TORCH_LIBRARY_IMPL(esper, CPU, m) {
    m.impl("grad_stats", &esper::grad_stats::grad_stats);
    m.impl("grad_stats.out", &esper::grad_stats::grad_stats_out);
}
