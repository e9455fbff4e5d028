// Staging a batch on the CPU.
//
// Policy: one pass, from the rows of the dataset straight into the model's input. The work of a pixel is to look up
// each of its bytes, which no vector instruction helps with, so there is one copy of this code for all instruction
// sets. The table is rounded to the output's dtype first, 256 entries a channel. A sample depends on nothing but its
// own index, so the result is the same for any number of threads. All indices are checked before anything is written.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "../stage_batch_arguments.h"

namespace esper::stage_batch {
namespace {

constexpr int64_t kParallelElements = 256 * 1024;  // below this, waking threads costs more than it saves
constexpr int64_t kElementsPerTask = 64 * 1024;

void to_dtype(float value, float& out) {
    out = value;
}
void to_dtype(float value, uint16_t& out) {  // bfloat16
    uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof(bits));
    out = bfloat16_of(bits);
}

// Checks every index of the batch and returns the position of its first.
int64_t checked_first(const char* op, const Selection& selection, int64_t first) {
    check(first >= 0 && first + selection.batch <= selection.available, op, ": a batch of ", selection.batch,
          " from position ", first, " is outside the ", selection.available, " indices");
    for (int64_t b = 0; b < selection.batch; ++b) {
        const int64_t index = selection.indices[first + b];
        check(index >= 0 && index < selection.dataset, op, ": index ", index, " at position ", first + b,
              " is outside 0..", selection.dataset - 1);
    }
    return first;
}

// Runs work(b) for every sample, on many threads if that pays.
template <typename Work>
void for_samples(int64_t batch, int64_t elements, const Work& work) {
    const auto run = [&](int64_t begin, int64_t end) {
        for (int64_t b = begin; b < end; ++b) work(b);
    };
    if (batch * elements >= kParallelElements && torch::stable::get_num_threads() > 1) {
        torch::stable::parallel_for(0, batch, std::max<int64_t>(1, kElementsPerTask / elements), run);
    } else {
        run(0, batch);
    }
}

// Writes one image [H, W, C]. kChannels is C where it is known when compiling, 0 elsewhere.
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
void stage_all(const Images& problem, int64_t epoch, int64_t first) {
    std::vector<Out> table(static_cast<size_t>(problem.channels) * 256);  // [C, 256]
    for (size_t i = 0; i < table.size(); ++i) to_dtype(problem.table[i], table[i]);
    const int64_t elements = static_cast<int64_t>(problem.height) * problem.width * problem.channels;
    for_samples(problem.selection.batch, elements, [&](int64_t b) {
        const int64_t index = problem.selection.indices[first + b];
        const Placement placement = draw(static_cast<uint64_t>(problem.seed), static_cast<uint64_t>(epoch),
                                         static_cast<uint64_t>(index), problem.padding, problem.flip);
        stage_image<Out, kChannels>(problem, problem.images + index * elements, table.data(), placement,
                                    static_cast<Out*>(problem.out) + b * elements);
        if (problem.targets != nullptr) problem.targets_out[b] = problem.targets[index];
    });
}

template <typename Out>
void stage_channels(const Images& problem, int64_t epoch, int64_t first) {
    switch (problem.channels) {
        case 1:
            return stage_all<Out, 1>(problem, epoch, first);
        case 3:
            return stage_all<Out, 3>(problem, epoch, first);
        default:
            return stage_all<Out, 0>(problem, epoch, first);
    }
}

void stage_images(const Tensor& images, const Tensor& indices, const Tensor& table,
                  const std::optional<Tensor>& targets, int64_t seed, int64_t epoch, int64_t first,
                  const std::optional<Tensor>& cursor, int64_t padding, bool flip, const Tensor& out,
                  const std::optional<Tensor>& targets_out) {
    const Images problem =
        read_images(images, indices, table, targets, seed, epoch, first, cursor, padding, flip, out, targets_out);
    const Selection& selection = problem.selection;
    const bool moving = selection.cursor != nullptr;
    const int64_t start = checked_first("stage_images", selection, moving ? selection.cursor[1] : first);
    if (problem.is_bfloat16) {
        stage_channels<uint16_t>(problem, moving ? selection.cursor[0] : epoch, start);
    } else {
        stage_channels<float>(problem, moving ? selection.cursor[0] : epoch, start);
    }
}

template <typename Token>
void stage_rows(const Tokens& problem, int64_t first) {
    for_samples(problem.selection.batch, problem.length, [&](int64_t b) {
        const Token* row =
            static_cast<const Token*>(problem.tokens) + problem.selection.indices[first + b] * problem.stride;
        const int64_t offset = b * problem.length;
        for (int64_t t = 0; t < problem.length; ++t) problem.out[offset + t] = static_cast<int64_t>(row[t]);
        if (problem.targets_out == nullptr) return;
        for (int64_t t = 0; t < problem.length; ++t) {
            problem.targets_out[offset + t] = static_cast<int64_t>(row[t + 1]);
        }
    });
}

void stage_tokens(const Tensor& tokens, const Tensor& indices, int64_t first, const std::optional<Tensor>& cursor,
                  const Tensor& out, const std::optional<Tensor>& targets_out) {
    const Tokens problem = read_tokens(tokens, indices, first, cursor, out, targets_out);
    const Selection& selection = problem.selection;
    const int64_t start =
        checked_first("stage_tokens", selection, selection.cursor != nullptr ? selection.cursor[1] : first);
    switch (problem.dtype) {
        case ScalarType::Long:
            return stage_rows<int64_t>(problem, start);
        case ScalarType::Int:
            return stage_rows<int32_t>(problem, start);
        case ScalarType::UInt16:
            return stage_rows<uint16_t>(problem, start);
        default:
            return stage_rows<uint8_t>(problem, start);
    }
}

}  // namespace
}  // namespace esper::stage_batch

STABLE_TORCH_LIBRARY_IMPL(esper, CPU, m) {
    m.impl("stage_images", TORCH_BOX(&esper::stage_batch::stage_images));
    m.impl("stage_tokens", TORCH_BOX(&esper::stage_batch::stage_tokens));
}
