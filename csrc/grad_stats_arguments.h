// Arguments of esper::grad_stats, read and checked once for both devices.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <utility>
#include <vector>

#include "grad_stats.h"
#include "tensors.h"

namespace esper::grad_stats {

struct Gradient {
    const void* data;
    int64_t elements;
    Dtype dtype;
};

struct Arguments {
    std::vector<Gradient> gradients;   // [N]
    std::vector<int64_t> group_sizes;  // [G], sums to N
    double max_norm;
    double exploding_norm;
    Device device;

    // Owners of the memory that `gradients` points into.
    std::vector<OwnedTensor> tensors;
    std::vector<torch::stable::Tensor> copies;
};

// The caller's tensors of the out= form.
struct Outputs {
    OwnedTensor fields;   // [G, kFieldCount] float64
    OwnedTensor norms;    // [N] float64
    OwnedTensor scratch;  // [R, kScratchColumns] float64, zero before its first use; may be empty on the CPU
};

// Whether the elements fill their memory, in any order: sums and counts do not depend on it.
inline bool is_dense(AtenTensorHandle tensor, int64_t numel) {
    bool contiguous = false;
    TORCH_ERROR_CODE_CHECK(aoti_torch_is_contiguous(tensor, &contiguous));
    return contiguous || numel == 0 || Layout(tensor).is_dense();
}

inline void read_gradient(Arguments& arguments, OwnedTensor tensor, int64_t position) {
    check(device_of(tensor.get()) == arguments.device, "grad_stats: gradient ", position,
          " is on another device than the rest of this call");
    Gradient gradient{};
    gradient.dtype = dtype_of(tensor.get());
    check(gradient.dtype != Dtype::kOther, "grad_stats: gradient ", position,
          " must be float32, bfloat16, float16 or float64");
    gradient.elements = numel_of(tensor.get());
    if (!is_dense(tensor.get(), gradient.elements)) {
        // Holes or repeats (a sliced or expanded gradient): rare enough for a copy.
        arguments.copies.push_back(torch::stable::contiguous(torch::stable::Tensor(tensor.release())));
        gradient.data = arguments.copies.back().const_data_ptr();
    } else {
        gradient.data = const_data(tensor.get());
        arguments.tensors.push_back(std::move(tensor));
    }
    arguments.gradients.push_back(gradient);
}

// Reads (Tensor[] gradients, int[] group_sizes, float max_norm, float exploding_norm) from the bottom of the stack.
// `like` gives the device; if it is null, the first gradient does.
inline Arguments read_arguments(StableIValue* stack, AtenTensorHandle like) {
    Arguments arguments{};
    const OwnedList list = take_list(stack[0]);
    const OwnedList sizes = take_list(stack[1]);
    arguments.max_norm = torch::stable::detail::to<double>(stack[2]);
    arguments.exploding_norm = torch::stable::detail::to<double>(stack[3]);
    check(arguments.max_norm > 0, "grad_stats: max_norm must be positive, got ", arguments.max_norm);
    check(arguments.exploding_norm > 0, "grad_stats: exploding_norm must be positive, got ", arguments.exploding_norm);

    const int64_t count = list_size(list);
    const int64_t groups = list_size(sizes);
    int64_t total = 0;
    arguments.group_sizes.reserve(static_cast<size_t>(groups));
    for (int64_t g = 0; g < groups; ++g) {
        const auto size = torch::stable::detail::to<int64_t>(list_item(sizes, g));
        check(size >= 0, "grad_stats: group ", g, " has a negative size");
        arguments.group_sizes.push_back(size);
        total += size;
    }
    check(total == count, "grad_stats: group_sizes add up to ", total, " but there are ", count, " gradients");

    check(like != nullptr || count > 0, "grad_stats: no gradient to take the device from; use the out= form");
    if (like != nullptr) arguments.device = device_of(like);
    arguments.gradients.reserve(static_cast<size_t>(count));
    arguments.tensors.reserve(static_cast<size_t>(count));
    for (int64_t n = 0; n < count; ++n) {
        OwnedTensor tensor = take_tensor(list_item(list, n));
        if (like == nullptr && n == 0) arguments.device = device_of(tensor.get());
        read_gradient(arguments, std::move(tensor), n);
    }
    return arguments;
}

// New tensors (fields, norms).
inline std::pair<OwnedTensor, OwnedTensor> new_outputs(const Arguments& arguments) {
    return {empty_float64(arguments.device, {static_cast<int64_t>(arguments.group_sizes.size()), kFieldCount}),
            empty_float64(arguments.device, {static_cast<int64_t>(arguments.gradients.size())})};
}

// Takes the out= tensors (fields, norms, scratch) from stack[4..6].
inline Outputs take_outputs(StableIValue* stack) {
    return Outputs{take_tensor(stack[4]), take_tensor(stack[5]), take_tensor(stack[6])};
}

inline double* checked_float64(AtenTensorHandle tensor, const char* name, Device device) {
    bool contiguous = false;
    TORCH_ERROR_CODE_CHECK(aoti_torch_is_contiguous(tensor, &contiguous));
    check(dtype_code(tensor) == aoti_torch_dtype_float64() && contiguous && device_of(tensor) == device,
          "grad_stats: out= tensor `", name, "` must be contiguous float64 on the gradients' device");
    return static_cast<double*>(mutable_data(tensor));
}

inline void check_output_sizes(const Arguments& arguments, const Outputs& outputs) {
    const auto groups = static_cast<int64_t>(arguments.group_sizes.size());
    const auto count = static_cast<int64_t>(arguments.gradients.size());
    check(numel_of(outputs.fields.get()) == groups * kFieldCount && numel_of(outputs.norms.get()) == count,
          "grad_stats: out= was made for other groups: this call needs fields [", groups, ", ",
          static_cast<int>(kFieldCount), "] and norms [", count, "]");
}

}  // namespace esper::grad_stats
