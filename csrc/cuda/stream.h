// What a launcher of kernels needs: device, stream and the checks of errors.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>

#include "../tensors.h"

namespace esper {

// Makes a device current for its lifetime, and is the stream that PyTorch uses on it, so that kernels take their place
// in PyTorch's order and in its captures.
class DeviceStream {
 public:
    explicit DeviceStream(const Device& device) : guard_(device.index) {
        void* stream = nullptr;
        TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device.index, &stream));
        stream_ = static_cast<cudaStream_t>(stream);
    }
    operator cudaStream_t() const { return stream_; }

 private:
    torch::stable::accelerator::DeviceGuard guard_;
    cudaStream_t stream_;
};

}  // namespace esper
