// Staging a batch on CUDA.
//
// Policy: one launch, no scratch memory. A warp takes up to 256 vectors of 16 bytes of one output image; all its lanes
// draw the image's placement, which costs them no more than if one did. A lane writes one vector at a time and finds
// the byte behind each of its elements, with the arithmetic of stage_batch.h. The table lies in shared memory, rounded
// to the output's dtype. The cursor is read on the device, so that a captured graph moves on. An index that is not in
// the dataset cannot be reported from here without a sync: its image is NaN, its target and tokens -1.
#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "../stage_batch_arguments.h"
#include "stream.h"

namespace esper::stage_batch {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int32_t kVectorsPerWarp = 256;  // of one image, 8 a lane
constexpr int64_t kMaxBlocks = 1024;
constexpr int64_t kMaxTokenBlocks = 65536;

// Place of sample b in the dataset, or -1 if it has none.
__device__ int64_t index_of(const Selection& selection, int64_t b) {
    const int64_t place = selection.start() + b;
    if (place < 0 || place >= selection.available) return -1;
    const int64_t index = selection.indices[place];
    return index >= 0 && index < selection.dataset ? index : -1;
}

// kVector elements of an output image [H, W, C], from element `start` on.
template <typename Out, int kChannels, int kVector>
__device__ void stage_vector(const Images& problem, const uint8_t* image, const Out* table, const Placement& placement,
                             int32_t start, Out (&values)[kVector]) {
    const int32_t channels = kChannels > 0 ? kChannels : problem.channels;
    const int32_t pixel = start / channels;
    int32_t c = start - pixel * channels;
    int32_t y = pixel / problem.width;
    int32_t x = pixel - y * problem.width;
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
        const int32_t from_y = source_row(placement, y);
        const int32_t from_x = source_column(placement, x, problem.width);
        const bool inside = is_inside(from_y, problem.height) && is_inside(from_x, problem.width);
        const int value = inside ? __ldg(image + (from_y * problem.width + from_x) * channels + c) : 0;
        values[k] = table[c * 256 + value];
        if (++c == channels) {
            c = 0;
            if (++x == problem.width) {
                x = 0;
                ++y;
            }
        }
    }
}

// kChannels is C if it is known when compiling, else 0. An image holds a whole number of vectors.
template <typename Out, int kChannels, int kVector>
__global__ void __launch_bounds__(kThreads) images_kernel(const __grid_constant__ Images problem) {
    extern __shared__ __align__(16) unsigned char shared_memory[];
    Out* table = reinterpret_cast<Out*>(shared_memory);  // [C, 256]
    for (int i = static_cast<int>(threadIdx.x); i < problem.channels * 256; i += kThreads) {
        to_dtype(problem.table[i], table[i]);
    }
    __syncthreads();

    const int32_t elements = problem.height * problem.width * problem.channels;
    const int32_t vectors = elements / kVector;
    const int32_t parts = (vectors + kVectorsPerWarp - 1) / kVectorsPerWarp;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const Selection& selection = problem.selection;
    const int64_t epoch = selection.current_epoch();
    for (int64_t item = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; item < selection.batch * parts;
         item += static_cast<int64_t>(gridDim.x) * kWarps) {
        const int64_t b = item / parts;
        const auto part = static_cast<int32_t>(item - b * parts);
        const int64_t index = index_of(selection, b);
        if (problem.targets != nullptr && part == 0 && lane == 0) {
            problem.targets_out[b] = index < 0 ? -1 : problem.targets[index];
        }
        const Placement placement = draw(static_cast<uint64_t>(problem.seed), static_cast<uint64_t>(epoch),
                                         static_cast<uint64_t>(index), problem.padding, problem.flip);
        const uint8_t* image = problem.images + (index < 0 ? 0 : index) * elements;
        Out* out = static_cast<Out*>(problem.out) + b * elements;
        const int32_t end = min(vectors, (part + 1) * kVectorsPerWarp);
        for (int32_t v = part * kVectorsPerWarp + lane; v < end; v += 32) {
            __align__(16) Out values[kVector];
            if (index < 0) {
#pragma unroll
                for (int k = 0; k < kVector; ++k) to_dtype(__uint_as_float(0x7fc00000u), values[k]);  // NaN
            } else {
                stage_vector<Out, kChannels, kVector>(problem, image, table, placement, v * kVector, values);
            }
            if constexpr (kVector * sizeof(Out) == sizeof(uint4)) {
                reinterpret_cast<uint4*>(out)[v] = *reinterpret_cast<const uint4*>(values);
            } else {
#pragma unroll
                for (int k = 0; k < kVector; ++k) out[v * kVector + k] = values[k];
            }
        }
    }
}

template <typename Token>
__global__ void __launch_bounds__(kThreads) tokens_kernel(const __grid_constant__ Tokens problem) {
    const int64_t elements = problem.selection.batch * problem.length;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < elements;
         i += static_cast<int64_t>(gridDim.x) * kThreads) {
        const int64_t b = i / problem.length;
        const int64_t index = index_of(problem.selection, b);
        const Token* token =
            static_cast<const Token*>(problem.tokens) + index * problem.stride + (i - b * problem.length);
        problem.out[i] = index < 0 ? -1 : static_cast<int64_t>(token[0]);
        if (problem.targets_out != nullptr) {
            problem.targets_out[i] = index < 0 ? -1 : static_cast<int64_t>(token[1]);
        }
    }
}

// --- launchers ------------------------------------------------------------------------------------------------------

template <typename Out, int kChannels, int kVector>
void launch_images(const Images& problem, cudaStream_t stream) {
    const int64_t vectors = problem.elements() / kVector;
    const int64_t items = problem.selection.batch * ((vectors + kVectorsPerWarp - 1) / kVectorsPerWarp);
    const int64_t blocks = std::min(kMaxBlocks, (items + kWarps - 1) / kWarps);
    const size_t table_bytes = static_cast<size_t>(problem.channels) * 256 * sizeof(Out);
    images_kernel<Out, kChannels, kVector>
        <<<static_cast<unsigned int>(blocks), kThreads, table_bytes, stream>>>(problem);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
}

template <typename Out, int kChannels>
void launch_vectors(const Images& problem, cudaStream_t stream) {
    constexpr int kVector = sizeof(uint4) / sizeof(Out);
    const bool aligned = reinterpret_cast<uintptr_t>(problem.out) % sizeof(uint4) == 0;
    if (aligned && problem.elements() % kVector == 0) {
        launch_images<Out, kChannels, kVector>(problem, stream);
    } else {
        launch_images<Out, kChannels, 1>(problem, stream);
    }
}

void stage_images(const Tensor& images, const Tensor& indices, const Tensor& table,
                  const std::optional<Tensor>& targets, int64_t seed, int64_t epoch, int64_t first,
                  const std::optional<Tensor>& cursor, int64_t padding, bool flip, const Tensor& out,
                  const std::optional<Tensor>& targets_out) {
    const Images problem =
        read_images(images, indices, table, targets, seed, epoch, first, cursor, padding, flip, out, targets_out);
    if (problem.selection.batch == 0) return;
    const DeviceStream stream(device_of(images));
    for_images(problem, [&](auto type, auto channels) {
        launch_vectors<decltype(type), decltype(channels)::value>(problem, stream);
    });
}

template <typename Token>
void launch_tokens(const Tokens& problem, cudaStream_t stream) {
    const int64_t elements = problem.selection.batch * problem.length;
    const int64_t blocks = std::min(kMaxTokenBlocks, (elements + kThreads - 1) / kThreads);
    tokens_kernel<Token><<<static_cast<unsigned int>(blocks), kThreads, 0, stream>>>(problem);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
}

void stage_tokens(const Tensor& tokens, const Tensor& indices, int64_t first, const std::optional<Tensor>& cursor,
                  const Tensor& out, const std::optional<Tensor>& targets_out) {
    const Tokens problem = read_tokens(tokens, indices, first, cursor, out, targets_out);
    if (problem.selection.batch == 0 || problem.length == 0) return;
    const DeviceStream stream(device_of(tokens));
    for_tokens(problem, [&](auto token) { launch_tokens<decltype(token)>(problem, stream); });
}

}  // namespace
}  // namespace esper::stage_batch

STABLE_TORCH_LIBRARY_IMPL(esper, CUDA, m) {
    m.impl("stage_images", TORCH_BOX(&esper::stage_batch::stage_images));
    m.impl("stage_tokens", TORCH_BOX(&esper::stage_batch::stage_tokens));
}
