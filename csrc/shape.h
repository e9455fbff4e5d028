// Naming a tensor's shape in an error.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <string>

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

}  // namespace esper
