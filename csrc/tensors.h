// Tensors as operators receive and check them: arguments, data, shape, layout and device.
#pragma once

#include <torch/csrc/stable/c/shim.h>
#include <torch/csrc/stable/stableivalue_conversions.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/shim_utils.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "host_device.h"

namespace esper {

// A part of a message as text; numbers look as they do on a C++ stream.
template <typename Part>
std::string text_of(const Part& part) {
    if constexpr (std::is_floating_point_v<Part>) {
        char text[32];
        std::snprintf(text, sizeof(text), "%g", static_cast<double>(part));
        return text;
    } else if constexpr (std::is_arithmetic_v<Part>) {
        return std::to_string(part);
    } else {
        return part;
    }
}

// A wrong argument: raised in Python as RuntimeError with exactly this text.
//
// No C++ streams here or anywhere in these modules. Some compilers link libstdc++ into each module; its streams then
// take their locale from torch's copy, and print nothing or crash.
template <typename... Parts>
void check(bool condition, const Parts&... parts) {
    if (condition) return;
    std::string text;
    ((text += text_of(parts)), ...);
    throw std::runtime_error(text);
}

// --- arguments of a boxed kernel, through torch's C shim -----------------------------------------------------------

// A boxed kernel receives `stack`, one 64-bit value per schema argument, and owns what those values point to. Most ops
// can let TORCH_BOX unpack them. An op over a list of many small tensors cannot afford the shared_ptr that
// torch::stable::Tensor makes per element, so it uses the owners below and looks at each element through its handle.

struct DeleteTensor {
    void operator()(AtenTensorHandle handle) const { aoti_torch_delete_tensor_object(handle); }
};

struct DeleteList {
    void operator()(StableListHandle handle) const { torch_delete_list(handle); }
};

// One tensor reference that this kernel owns.
using OwnedTensor = std::unique_ptr<AtenTensorOpaque, DeleteTensor>;
// One argument list that this kernel owns.
using OwnedList = std::unique_ptr<StableListOpaque, DeleteList>;

inline OwnedTensor take_tensor(StableIValue value) {
    return OwnedTensor(torch::stable::detail::to<AtenTensorHandle>(value));
}

inline OwnedList take_list(StableIValue value) {
    return OwnedList(torch::stable::detail::to<StableListHandle>(value));
}

// Hands a tensor back to the dispatcher as a return value.
inline StableIValue give_tensor(OwnedTensor tensor) {
    return torch::stable::detail::from(tensor.release());
}

inline int64_t list_size(const OwnedList& list) {
    size_t size = 0;
    TORCH_ERROR_CODE_CHECK(torch_list_size(list.get(), &size));
    return static_cast<int64_t>(size);
}

// Takes one element. Tensors are moved out of the list: the caller owns what it gets, and an element can be taken once.
inline StableIValue list_item(const OwnedList& list, int64_t index) {
    StableIValue item = 0;
    TORCH_ERROR_CODE_CHECK(torch_list_get_item(list.get(), static_cast<size_t>(index), &item));
    return item;
}

// --- tensors -------------------------------------------------------------------------------------------------------

struct Device {
    int32_t type;
    int32_t index;
    bool operator==(const Device& other) const { return type == other.type && index == other.index; }
};

inline Device device_of(AtenTensorHandle tensor) {
    Device device{};
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor, &device.type));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor, &device.index));
    return device;
}

inline Device device_of(const torch::stable::Tensor& tensor) {
    return device_of(tensor.get());
}

inline int64_t numel_of(AtenTensorHandle tensor) {
    int64_t numel = 0;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_numel(tensor, &numel));
    return numel;
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

inline void* mutable_data(AtenTensorHandle tensor) {
    void* data = nullptr;
    TORCH_ERROR_CODE_CHECK(torch_get_mutable_data_ptr(tensor, &data));
    return data;
}

inline const void* const_data(AtenTensorHandle tensor) {
    const void* data = nullptr;
    TORCH_ERROR_CODE_CHECK(torch_get_const_data_ptr(tensor, &data));
    return data;
}

constexpr size_t kChannelsLast[4] = {1, 3, 2, 0};  // dimensions of [N, C, H, W] from the fastest

// A new tensor, not initialised: four dimensions [N, C, H, W] lie in channels_last, fewer are contiguous.
inline OwnedTensor empty(const Device& device, int32_t dtype, std::initializer_list<int64_t> sizes) {
    int64_t strides[4] = {};
    int64_t stride = 1;
    for (size_t i = 0; i < sizes.size(); ++i) {
        const size_t d = sizes.size() == 4 ? kChannelsLast[i] : sizes.size() - 1 - i;
        strides[d] = stride;
        stride *= std::max<int64_t>(sizes.begin()[d], 1);
    }
    AtenTensorHandle handle = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.begin(), strides, dtype,
                                                    device.type, device.index, &handle));
    return OwnedTensor(handle);
}

inline OwnedTensor empty_float64(const Device& device, std::initializer_list<int64_t> sizes) {
    return empty(device, aoti_torch_dtype_float64(), sizes);
}

// "[2, 3]".
inline std::string shape_of(const torch::stable::Tensor& tensor) {
    std::string text = "[";
    for (int64_t d = 0; d < tensor.dim(); ++d) {
        if (d > 0) text += ", ";
        text += std::to_string(tensor.size(d));
    }
    return text + "]";
}

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
