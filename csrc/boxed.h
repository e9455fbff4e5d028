// Reading a boxed kernel's arguments through torch's C shim.
//
// A boxed kernel receives `stack`, one 64-bit value per schema argument, and owns what those values point to. Most ops
// can let TORCH_BOX unpack them. An op over a list of many small tensors cannot afford the shared_ptr that
// torch::stable::Tensor makes per element, so it uses the owners below and looks at each element through its handle.
#pragma once

#include <torch/csrc/stable/c/shim.h>
#include <torch/csrc/stable/stableivalue_conversions.h>
#include <torch/headeronly/util/shim_utils.h>

#include <cstdint>
#include <memory>
#include <sstream>
#include <stdexcept>

namespace esper {

// A wrong argument: raised in Python as RuntimeError with exactly this text.
template <typename... Parts>
void check(bool condition, const Parts&... parts) {
    if (condition) return;
    std::ostringstream text;
    (text << ... << parts);
    throw std::runtime_error(text.str());
}

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

inline int64_t numel_of(AtenTensorHandle tensor) {
    int64_t numel = 0;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_numel(tensor, &numel));
    return numel;
}

// A new float64 tensor [rows, columns], or [rows] where `columns` is negative. Not initialised.
inline OwnedTensor empty_float64(Device device, int64_t rows, int64_t columns = -1) {
    const int64_t dims = columns < 0 ? 1 : 2;
    const int64_t sizes[2] = {rows, columns};
    const int64_t strides[2] = {columns < 0 ? 1 : columns, 1};
    AtenTensorHandle handle = nullptr;
    TORCH_ERROR_CODE_CHECK(
        aoti_torch_empty_strided(dims, sizes, strides, aoti_torch_dtype_float64(), device.type, device.index, &handle));
    return OwnedTensor(handle);
}

}  // namespace esper
