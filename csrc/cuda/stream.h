// Where to launch.
#pragma once

#include <cuda_runtime.h>

#include "../boxed.h"

namespace esper {

// The stream that PyTorch is using on this device, so that kernels take their place in its order and in its captures.
inline cudaStream_t current_stream(const Device& device) {
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device.index, &stream));
    return static_cast<cudaStream_t>(stream);
}

}  // namespace esper
