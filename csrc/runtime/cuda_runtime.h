// The few functions of the CUDA runtime that lanes need, from the library that torch loaded: nothing is linked, so this
// module loads everywhere. Handles are plain integers, as `torch.cuda.Stream.cuda_stream` gives them.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "interpreter.h"

namespace esper::host {

using Handle = std::uintptr_t;  // a cudaStream_t, a cudaEvent_t or a cudaGraphExec_t

// The runtime's own declarations, without its headers: cudaError_t is an int, and the handles are pointers.
struct CudaFunctions {
    int (*cudaDriverGetVersion)(int*);
    int (*cudaGetDevice)(int*);
    int (*cudaSetDevice)(int);
    int (*cudaGetLastError)();
    const char* (*cudaGetErrorString)(int);
    int (*cudaStreamCreateWithFlags)(void**, unsigned);
    int (*cudaStreamDestroy)(void*);
    int (*cudaStreamQuery)(void*);
    int (*cudaStreamWaitEvent)(void*, void*, unsigned);
    int (*cudaEventCreateWithFlags)(void**, unsigned);
    int (*cudaEventRecord)(void*, void*);
    int (*cudaEventDestroy)(void*);
    int (*cudaGraphLaunch)(void*, void*);
};

class CudaRuntime {
 public:
    // Of the library at `path`, or of the one that is in this process already. Throws runtime_error that says what was
    // looked for.
    explicit CudaRuntime(const std::string& path);
    CudaRuntime(const CudaRuntime&) = delete;
    CudaRuntime& operator=(const CudaRuntime&) = delete;

    const std::string& path() const { return path_; }

    // The newest CUDA version that the driver serves, 1000 * major + 10 * minor; 0 without a driver.
    int driver_version() const;

    // Streams that do not wait for the default stream, and events without times. Each of them is a new one, unlike
    // torch's, where every 33rd stream is one of the first 32 again. They live until they are destroyed here: not even
    // the end of this object ends them, since torch may still hold memory that belongs to a stream.
    Handle create_stream(int device);
    void destroy_stream(Handle stream);
    Handle create_event(int device);
    void destroy_event(Handle event);

    void record_event(Handle event, Handle stream) const;
    void wait_event(Handle stream, Handle event) const;  // what comes later on `stream` comes after `event`
    bool idle(Handle stream) const;

    // Wait for all `streams`; the words of the first error, or none. Ended by the second handler that raises.
    std::string wait(const std::vector<Handle>& streams, Outside& outside) const;

    // cudaSuccess is 0. An error is taken from the runtime's memory too: torch looks there after its own calls.
    int launch(Handle graph, Handle stream) const;
    std::string explain(int code) const;

    // Makes `device` the current one of this thread for as long as it lives. Since CUDA 12 cudaSetDevice makes a
    // context on the device that it is given (several hundred megabytes of its memory). So it is not called for a
    // device that is current already, and `device` stays current if the one before it has no context; PyTorch's guards
    // do the same.
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
    std::set<Handle> streams_, events_;  // created here; the GIL guards them
};

void bind_cuda_runtime(pybind11::module_& m);

}  // namespace esper::host
