// The functions of the CUDA runtime that GPU lanes need, looked up in the library that torch loaded: nothing is linked,
// so this module loads everywhere. Handles are integers, as in `torch.cuda.Stream.cuda_stream`.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <vector>

#include "interpreter.h"

namespace esper::runtime {

using Handle = std::uintptr_t;  // a cudaStream_t or a cudaGraphExec_t

// Signatures of the runtime, without its headers: cudaError_t is an int, handles are pointers.
struct CudaFunctions {
    int (*cudaDriverGetVersion)(int*);
    int (*cudaGetDevice)(int*);
    int (*cudaSetDevice)(int);
    int (*cudaGetLastError)();
    const char* (*cudaGetErrorString)(int);
    int (*cudaStreamCreateWithFlags)(void**, unsigned);
    int (*cudaStreamQuery)(void*);
    int (*cudaGraphLaunch)(void*, void*);
};

class CudaRuntime {
 public:
    // Opens the library at `path`, or the one that this process has loaded. Throws runtime_error that lists the names
    // it looked for.
    explicit CudaRuntime(const std::string& path);
    CudaRuntime(const CudaRuntime&) = delete;
    CudaRuntime& operator=(const CudaRuntime&) = delete;

    const std::string& path() const { return path_; }

    // The newest CUDA version that the driver supports, 1000 * major + 10 * minor; 0 without a driver.
    int driver_version() const;

    // A stream that does not wait for the default stream. Each is a new one, unlike torch's, of which the 33rd is the
    // first again. It is never destroyed: torch may hold memory that belongs to it.
    Handle create_stream(int device) const;

    // Waits until all work on `streams` is done or has failed, or until a second signal handler raises.
    void wait(const std::vector<Handle>& streams, WithoutGil& without_gil) const;

    // Returns the error code; cudaSuccess is 0. Also clears the runtime's last error, which torch would find.
    int launch(Handle graph, Handle stream) const;
    std::string explain(int code) const;

    // Makes `device` current on this thread for the lifetime of the guard. Since CUDA 12 cudaSetDevice makes a context
    // on its device (several hundred megabytes of memory). So it is not called for a device that is current already,
    // and `device` stays current if the previous one has no context; PyTorch's guards do the same.
    class OnDevice {
     public:
        OnDevice(const CudaRuntime& runtime, int device);
        ~OnDevice();
        OnDevice(const OnDevice&) = delete;
        OnDevice& operator=(const OnDevice&) = delete;

     private:
        const CudaRuntime& runtime_;
        const int device_;
        int before_ = 0;
    };

 private:
    int note(int code) const;
    void check(int code, const char* function) const;
    bool has_context(int device) const;

    void* library_ = nullptr;  // never closed
    CudaFunctions call_{};
    std::string path_;
};

void bind_cuda_runtime(pybind11::module_& m);

}  // namespace esper::runtime
