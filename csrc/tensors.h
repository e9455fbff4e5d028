// Shape, layout and device of tensors, for the checks of arguments.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <string>
#include <utility>
#include <vector>

#include "boxed.h"
#include "host_device.h"

namespace esper {

// "[2, 3]".
inline std::string shape_of(const torch::stable::Tensor& tensor) {
    std::string text = "[";
    for (int64_t d = 0; d < tensor.dim(); ++d) {
        if (d > 0) text += ", ";
        text += std::to_string(tensor.size(d));
    }
    return text + "]";
}

inline Device device_of(const torch::stable::Tensor& tensor) {
    return device_of(tensor.get());
}

constexpr size_t kChannelsLast[4] = {1, 3, 2, 0};  // dimensions of [N, C, H, W] from the fastest

// Whether a tensor [N, C, H, W] is contiguous as [N, H, W, C]. The stride of a dimension of size 1 has no meaning.
inline bool is_channels_last(const torch::stable::Tensor& tensor) {
    int64_t expected = 1;
    for (const size_t dim : kChannelsLast) {
        const auto d = static_cast<int64_t>(dim);
        if (tensor.size(d) != 1 && tensor.stride(d) != expected) return false;
        expected *= tensor.size(d);
    }
    return true;
}

inline int32_t dtype_code(AtenTensorHandle tensor) {
    int32_t code = 0;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor, &code));
    return code;
}

inline Dtype dtype_of(AtenTensorHandle tensor) {
    static const std::array<int32_t, 4> known = {aoti_torch_dtype_float32(), aoti_torch_dtype_bfloat16(),
                                                 aoti_torch_dtype_float16(), aoti_torch_dtype_float64()};
    return static_cast<Dtype>(std::find(known.begin(), known.end(), dtype_code(tensor)) - known.begin());
}

// Sizes and strides of a tensor, valid as long as the tensor.
struct Layout {
    explicit Layout(AtenTensorHandle tensor) {
        TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(tensor, &dims));
        TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor, &sizes));
        TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(tensor, &strides));
    }
    int64_t dims = 0;
    int64_t* sizes = nullptr;
    int64_t* strides = nullptr;

    bool same_sizes(const Layout& other) const {
        return dims == other.dims && std::equal(sizes, sizes + dims, other.sizes);
    }
    // Whether each element has the same offset in both, given equal sizes.
    bool same_offsets(const Layout& other) const {
        for (int64_t d = 0; d < dims; ++d) {
            if (sizes[d] != 1 && strides[d] != other.strides[d]) return false;
        }
        return true;
    }
    // Whether the elements are adjacent in memory, in any order: sorted by stride, each stride is the product of the
    // sizes before it.
    bool is_dense() const {
        std::vector<std::pair<int64_t, int64_t>> axes;  // (stride, size)
        for (int64_t d = 0; d < dims; ++d) {
            if (sizes[d] != 1) axes.emplace_back(strides[d], sizes[d]);
        }
        std::sort(axes.begin(), axes.end());
        int64_t expected = 1;
        for (const auto& [stride, size] : axes) {
            if (stride != expected) return false;
            expected *= size;
        }
        return true;
    }
};

}  // namespace esper
