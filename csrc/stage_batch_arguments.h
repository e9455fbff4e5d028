// Arguments of esper::stage_images and esper::stage_tokens, checked once for both devices.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <limits>
#include <optional>
#include <type_traits>

#include "stage_batch.h"
#include "tensors.h"

namespace esper::stage_batch {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kMaxChannels = 32;  // so that the tables fit a CUDA block's shared memory
constexpr int64_t kMaxPadding = 1 << 20;

// Which samples of the dataset become the batch: indices[start() + b].
struct Selection {
    const int64_t* indices;  // [n]
    int64_t available;       // n
    int64_t batch;           // B
    int64_t dataset;         // N, samples to choose from
    int64_t epoch;
    int64_t first;
    const int64_t* cursor;  // [2] (epoch, first) on the device in place of the two above, or null

    ESPER_HOST_DEVICE int64_t start() const { return cursor != nullptr ? cursor[1] : first; }
    ESPER_HOST_DEVICE int64_t current_epoch() const { return cursor != nullptr ? cursor[0] : epoch; }
};

struct Images {
    const uint8_t* images;   // [N, H, W, C]
    const float* table;      // [C, 256]
    const int64_t* targets;  // [N] or null
    int64_t* targets_out;    // [B] or null
    void* out;               // [B, C, H, W] in channels_last order, that is [B, H, W, C]
    bool is_bfloat16;        // else float32
    int32_t height;
    int32_t width;
    int32_t channels;
    int64_t seed;
    int32_t padding;
    bool flip;
    Selection selection;

    int64_t elements() const { return static_cast<int64_t>(height) * width * channels; }  // of an image
};

struct Tokens {
    const void* tokens;  // [N, L], rows `stride` tokens apart
    ScalarType dtype;
    int64_t stride;
    int64_t length;        // T
    int64_t* out;          // [B, T]
    int64_t* targets_out;  // [B, T] the next tokens, or null
    Selection selection;
};

inline void check_device(const char* op, const char* name, const Tensor& tensor, const Tensor& like) {
    check(tensor.device() == like.device(), op, ": ", name, " is on another device than the dataset");
}

// A contiguous int64 vector of `size` values (any number if negative), on the device of `like`.
inline int64_t* int64_vector(const char* op, const char* name, const Tensor& tensor, const Tensor& like, int64_t size) {
    check_device(op, name, tensor, like);
    check(tensor.scalar_type() == ScalarType::Long && tensor.dim() == 1 && tensor.is_contiguous(), op, ": ", name,
          " must be a contiguous int64 vector, got shape ", shape_of(tensor));
    check(size < 0 || tensor.numel() == size, op, ": ", name, " must hold ", size, " values, got ", tensor.numel());
    return static_cast<int64_t*>(tensor.data_ptr());
}

inline Selection read_selection(const char* op, const Tensor& dataset, const Tensor& indices, int64_t batch,
                                int64_t epoch, int64_t first, const std::optional<Tensor>& cursor) {
    Selection selection{};
    selection.indices = int64_vector(op, "indices", indices, dataset, -1);
    selection.available = indices.numel();
    selection.batch = batch;
    selection.dataset = dataset.size(0);
    selection.epoch = epoch;
    selection.first = first;
    if (cursor) {
        selection.cursor = int64_vector(op, "cursor (epoch, first)", *cursor, dataset, 2);
    } else {
        check(first >= 0 && first + batch <= selection.available, op, ": a batch of ", batch, " from position ", first,
              " is outside the ", selection.available, " indices");
    }
    return selection;
}

inline Images read_images(const Tensor& images, const Tensor& indices, const Tensor& table,
                          const std::optional<Tensor>& targets, int64_t seed, int64_t epoch, int64_t first,
                          const std::optional<Tensor>& cursor, int64_t padding, bool flip, const Tensor& out,
                          const std::optional<Tensor>& targets_out) {
    constexpr const char* kOp = "stage_images";
    check(images.scalar_type() == ScalarType::Byte && images.dim() == 4 && images.is_contiguous(), kOp,
          ": images must be contiguous uint8 [N, H, W, C], got shape ", shape_of(images));
    const int64_t height = images.size(1);
    const int64_t width = images.size(2);
    const int64_t channels = images.size(3);
    check(channels >= 1 && channels <= kMaxChannels, kOp, ": images must have 1 to ", kMaxChannels,
          " channels in their last dimension, got shape ", shape_of(images));
    check(height >= 1 && width >= 1 && height * width * channels <= std::numeric_limits<int32_t>::max() / 2, kOp,
          ": images of ", height, " x ", width, " are too small or too large");
    check_device(kOp, "table", table, images);
    check(table.scalar_type() == ScalarType::Float && table.is_contiguous() && table.dim() == 2 &&
              table.size(0) == channels && table.size(1) == 256,
          kOp, ": table must be contiguous float32 [", channels, ", 256], got ", shape_of(table));
    check_device(kOp, "out", out, images);
    check(out.scalar_type() == ScalarType::Float || out.scalar_type() == ScalarType::BFloat16, kOp,
          ": out must be float32 or bfloat16");
    check(out.dim() == 4 && out.size(1) == channels && out.size(2) == height && out.size(3) == width, kOp,
          ": out must be [B, ", channels, ", ", height, ", ", width, "] for these images, got ", shape_of(out));
    check(out.numel() == 0 || is_channels_last(out), kOp, ": out must be in channels_last memory format");
    check(padding >= 0 && padding <= kMaxPadding, kOp, ": padding must be 0 to ", kMaxPadding, ", got ", padding);
    check(targets.has_value() == targets_out.has_value(), kOp, ": targets and targets_out go together");

    Images problem{};
    problem.images = static_cast<const uint8_t*>(images.const_data_ptr());
    problem.table = static_cast<const float*>(table.const_data_ptr());
    if (targets) {
        problem.targets = int64_vector(kOp, "targets", *targets, images, images.size(0));
        problem.targets_out = int64_vector(kOp, "targets_out", *targets_out, images, out.size(0));
    }
    problem.out = out.mutable_data_ptr();
    problem.is_bfloat16 = out.scalar_type() == ScalarType::BFloat16;
    problem.height = static_cast<int32_t>(height);
    problem.width = static_cast<int32_t>(width);
    problem.channels = static_cast<int32_t>(channels);
    problem.seed = seed;
    problem.padding = static_cast<int32_t>(padding);
    problem.flip = flip;
    problem.selection = read_selection(kOp, images, indices, out.size(0), epoch, first, cursor);
    return problem;
}

inline int64_t* token_output(const char* name, const Tensor& tensor, const Tensor& tokens, int64_t batch,
                             int64_t length) {
    constexpr const char* kOp = "stage_tokens";
    check_device(kOp, name, tensor, tokens);
    check(tensor.scalar_type() == ScalarType::Long && tensor.is_contiguous() && tensor.dim() == 2 &&
              tensor.size(0) == batch && tensor.size(1) == length,
          kOp, ": ", name, " must be contiguous int64 [B, ", length, "] for these tokens, got shape ",
          shape_of(tensor));
    return static_cast<int64_t*>(tensor.mutable_data_ptr());
}

inline Tokens read_tokens(const Tensor& tokens, const Tensor& indices, int64_t first,
                          const std::optional<Tensor>& cursor, const Tensor& out,
                          const std::optional<Tensor>& targets_out) {
    constexpr const char* kOp = "stage_tokens";
    const ScalarType dtype = tokens.scalar_type();
    check(dtype == ScalarType::Long || dtype == ScalarType::Int || dtype == ScalarType::UInt16 ||
              dtype == ScalarType::Byte,
          kOp, ": tokens must be int64, int32, uint16 or uint8");
    check(tokens.dim() == 2 && (tokens.size(1) <= 1 || tokens.stride(1) == 1), kOp,
          ": tokens must be [N, L] with the tokens of a row side by side, got shape ", shape_of(tokens));
    const int64_t length = tokens.size(1) - (targets_out ? 1 : 0);
    check(length >= 0, kOp, ": targets are the tokens that follow, and rows of ", tokens.size(1), " have none");
    check(out.dim() == 2, kOp, ": out must be [B, ", length, "], got shape ", shape_of(out));

    Tokens problem{};
    problem.tokens = tokens.const_data_ptr();
    problem.dtype = dtype;
    problem.stride = tokens.stride(0);
    problem.length = length;
    problem.out = token_output("out", out, tokens, out.size(0), length);
    if (targets_out) problem.targets_out = token_output("targets_out", *targets_out, tokens, out.size(0), length);
    problem.selection = read_selection(kOp, tokens, indices, out.size(0), 0, first, cursor);
    return problem;
}

// Calls body(out, channels): a value of the output's type, and the number of channels as a constant, or 0 if no kernel
// is compiled for it.
template <typename Body>
void for_images(const Images& problem, const Body& body) {
    const auto for_channels = [&](auto out) {
        if (problem.channels == 1) return body(out, std::integral_constant<int32_t, 1>{});
        if (problem.channels == 3) return body(out, std::integral_constant<int32_t, 3>{});
        body(out, std::integral_constant<int32_t, 0>{});
    };
    if (problem.is_bfloat16) return for_channels(uint16_t{});
    for_channels(float{});
}

// Calls body(token) with a value of the tokens' type.
template <typename Body>
void for_tokens(const Tokens& problem, const Body& body) {
    if (problem.dtype == ScalarType::Long) return body(int64_t{});
    if (problem.dtype == ScalarType::Int) return body(int32_t{});
    if (problem.dtype == ScalarType::UInt16) return body(uint16_t{});
    body(uint8_t{});
}

}  // namespace esper::stage_batch
