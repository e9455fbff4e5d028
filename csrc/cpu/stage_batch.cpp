// Staging a batch on the CPU.
//
// Policy: one pass, from the rows of the dataset straight into the model's input. The work of a pixel is to look up
// each of its bytes, which no vector instruction helps with, so there is one copy of this code for all instruction
// sets. The table is rounded to the output's dtype first, 256 entries a channel. A sample depends on nothing but its
// own index, so the result is the same for any number of threads. All indices are checked before anything is written.
#include <torch/csrc/stable/library.h>

#include <vector>

#include "../stage_batch_arguments.h"
#include "parallel.h"
#include "step.h"

namespace esper::stage_batch {
namespace {

// Checks every index of the batch and returns the first.
const int64_t* checked_indices(const char* op, const Selection& selection) {
    const int64_t start = selection.start();
    check(start >= 0 && start + selection.batch <= selection.available, op, ": a batch of ", selection.batch,
          " from position ", start, " is outside the ", selection.available, " indices");
    for (int64_t b = start; b < start + selection.batch; ++b) {
        const int64_t index = selection.indices[b];
        check(index >= 0 && index < selection.dataset, op, ": index ", index, " at position ", b, " is outside 0..",
              selection.dataset - 1);
    }
    return selection.indices + start;
}

// Writes one image [H, W, C]. kChannels is C if it is known when compiling, else 0.
template <typename Out, int32_t kChannels>
void stage_image(const Images& problem, const uint8_t* image, const Out* table, const Placement& placement, Out* out) {
    const int32_t channels = kChannels > 0 ? kChannels : problem.channels;
    for (int32_t y = 0; y < problem.height; ++y) {
        const int32_t from_y = source_row(placement, y);
        const bool row_inside = is_inside(from_y, problem.height);
        for (int32_t x = 0; x < problem.width; ++x) {
            const int32_t from_x = source_column(placement, x, problem.width);
            if (row_inside && is_inside(from_x, problem.width)) {
                const uint8_t* pixel = image + (from_y * problem.width + from_x) * channels;
                for (int32_t c = 0; c < channels; ++c) *out++ = table[c * 256 + pixel[c]];
            } else {
                for (int32_t c = 0; c < channels; ++c) *out++ = table[c * 256];
            }
        }
    }
}

template <typename Out, int32_t kChannels>
void stage_all(const Images& problem, const int64_t* indices) {
    std::vector<Out> table(static_cast<size_t>(problem.channels) * 256);  // [C, 256]
    for (size_t i = 0; i < table.size(); ++i) to_dtype(problem.table[i], table[i]);
    const int64_t elements = problem.elements();
    const int64_t epoch = problem.selection.current_epoch();
    for_parts(problem.selection.batch, problem.selection.batch * elements, [&](int64_t begin, int64_t end) {
        for (int64_t b = begin; b < end; ++b) {
            const int64_t index = indices[b];
            const Placement placement = draw(static_cast<uint64_t>(problem.seed), static_cast<uint64_t>(epoch),
                                             static_cast<uint64_t>(index), problem.padding, problem.flip);
            stage_image<Out, kChannels>(problem, problem.images + index * elements, table.data(), placement,
                                        static_cast<Out*>(problem.out) + b * elements);
            if (problem.targets != nullptr) problem.targets_out[b] = problem.targets[index];
        }
    });
}

}  // namespace

void stage(const Images& problem) {
    const int64_t* chosen = checked_indices("stage_images", problem.selection);
    for_images(problem, [&](auto type, auto channels) {
        stage_all<decltype(type), decltype(channels)::value>(problem, chosen);
    });
}

namespace {

void stage_images(const Tensor& images, const Tensor& indices, const Tensor& table,
                  const std::optional<Tensor>& targets, int64_t seed, int64_t epoch, int64_t first,
                  const std::optional<Tensor>& cursor, int64_t padding, bool flip, const Tensor& out,
                  const std::optional<Tensor>& targets_out) {
    stage(read_images(images, indices, table, targets, seed, epoch, first, cursor, padding, flip, out, targets_out));
}

template <typename Token>
void stage_rows(const Tokens& problem, const int64_t* indices) {
    for_parts(problem.selection.batch, problem.selection.batch * problem.length, [&](int64_t begin, int64_t end) {
        for (int64_t b = begin; b < end; ++b) {
            const Token* row = static_cast<const Token*>(problem.tokens) + indices[b] * problem.stride;
            const int64_t offset = b * problem.length;
            for (int64_t t = 0; t < problem.length; ++t) problem.out[offset + t] = static_cast<int64_t>(row[t]);
            if (problem.targets_out == nullptr) continue;
            for (int64_t t = 0; t < problem.length; ++t) {
                problem.targets_out[offset + t] = static_cast<int64_t>(row[t + 1]);
            }
        }
    });
}

void stage_tokens(const Tensor& tokens, const Tensor& indices, int64_t first, const std::optional<Tensor>& cursor,
                  const Tensor& out, const std::optional<Tensor>& targets_out) {
    const Tokens problem = read_tokens(tokens, indices, first, cursor, out, targets_out);
    const int64_t* chosen = checked_indices("stage_tokens", problem.selection);
    for_tokens(problem, [&](auto token) { stage_rows<decltype(token)>(problem, chosen); });
}

}  // namespace
}  // namespace esper::stage_batch

STABLE_TORCH_LIBRARY_IMPL(esper, CPU, m) {
    m.impl("stage_images", TORCH_BOX(&esper::stage_batch::stage_images));
    m.impl("stage_tokens", TORCH_BOX(&esper::stage_batch::stage_tokens));
}
