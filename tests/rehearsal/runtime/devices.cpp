// Devices, their primary contexts, and errors. A context is made as CUDA 12 and later do: cudaSetDevice makes one too.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "state.h"

namespace rehearsal {

namespace {

thread_local int device = 0;
thread_local cudaError_t last_error = cudaSuccess;
const bool traced = std::getenv("REHEARSAL_TRACE") != nullptr;

int chosen_devices() {
    const char* const text = std::getenv("REHEARSAL_DEVICES");
    const int count = text == nullptr ? 1 : std::atoi(text);
    if (count >= 1 && count <= kMaxDevices) return count;
    std::fprintf(stderr, "REHEARSAL_DEVICES must be from 1 to %d\n", kMaxDevices);
    std::abort();
}

}  // namespace

State& state() {
    static State* const made = [] {
        auto* const fresh = new State;  // lives longer than the destructors of torch
        fresh->devices = chosen_devices();
        return fresh;
    }();
    return *made;
}

int current_device() {
    return device;
}

void touch_context(int number, const char* call) {
    auto& made_by = state().contexts[number];
    if (made_by.empty()) made_by = call;
}

cudaError_t fail(cudaError_t code, const std::string& why) {
    last_error = code;
    if (traced && code != cudaErrorNotReady) {
        std::fprintf(stderr, "rehearsal: %s (CUDA error %d)\n", why.c_str(), static_cast<int>(code));
    }
    return code;
}

void complain(const std::string& what) {
    if (traced) std::fprintf(stderr, "rehearsal: %s\n", what.c_str());
    state().complaints.push_back(what);
}

}  // namespace rehearsal

using namespace rehearsal;

namespace {

int attribute(cudaDeviceAttr which) {
    switch (which) {
        case cudaDevAttrComputeCapabilityMajor:
            return 9;
        case cudaDevAttrMultiProcessorCount:
            return 132;
        case cudaDevAttrMaxThreadsPerBlock:
            return 1024;
        case cudaDevAttrMaxThreadsPerMultiProcessor:
            return 2048;
        case cudaDevAttrMaxSharedMemoryPerBlock:
            return 49152;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin:
            return 232448;
        case cudaDevAttrWarpSize:
            return 32;
        case cudaDevAttrMaxGridDimX:
            return 2147483647;
        case cudaDevAttrMaxGridDimY:
        case cudaDevAttrMaxGridDimZ:
            return 65535;
        default:
            return 0;
    }
}

}  // namespace

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
    *count = state().devices;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int* number) {
    *number = device;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int number) {
    Lock lock(state().mutex);
    if (number < 0 || number >= state().devices) return fail(cudaErrorInvalidDevice, "cudaSetDevice");
    touch_context(number, "cudaSetDevice");
    device = number;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
    *value = attribute(which);
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
    *properties = {};
    std::strcpy(properties->name, "rehearsal without a GPU");
    properties->totalGlobalMem = size_t{16} << 30;
    properties->sharedMemPerBlock = attribute(cudaDevAttrMaxSharedMemoryPerBlock);
    properties->sharedMemPerBlockOptin = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    properties->sharedMemPerMultiprocessor = 233472;
    properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
    properties->warpSize = attribute(cudaDevAttrWarpSize);
    properties->maxThreadsPerBlock = properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
    properties->maxThreadsDim[2] = 64;
    properties->maxGridSize[0] = attribute(cudaDevAttrMaxGridDimX);
    properties->maxGridSize[1] = properties->maxGridSize[2] = attribute(cudaDevAttrMaxGridDimY);
    properties->major = attribute(cudaDevAttrComputeCapabilityMajor);
    properties->multiProcessorCount = attribute(cudaDevAttrMultiProcessorCount);
    properties->maxThreadsPerMultiProcessor = attribute(cudaDevAttrMaxThreadsPerMultiProcessor);
    properties->l2CacheSize = 50 << 20;
    properties->textureAlignment = 512;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int number) {
    std::snprintf(text, length, "0000:%02x:00.0", number);
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    Lock lock(state().mutex);
    touch_context(device, "cudaDeviceGetStreamPriorityRange");
    if (least != nullptr) *least = 0;
    if (greatest != nullptr) *greatest = -5;
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
    *can = 0;
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaGetLastError() {
    const cudaError_t code = last_error;
    last_error = cudaSuccess;
    return code;
}

cudaError_t cudaPeekAtLastError() {
    return last_error;
}

const char* cudaGetErrorName(cudaError_t code) {
    static thread_local char text[64];
    std::snprintf(text, sizeof text, "error %d of the rehearsal", static_cast<int>(code));
    return code == cudaSuccess ? "no error" : text;
}

const char* cudaGetErrorString(cudaError_t code) {
    switch (code) {
        case cudaErrorMemoryAllocation:
            return "out of memory";
        case cudaErrorStreamCaptureUnsupported:
            return "operation not permitted when stream is capturing";
        case cudaErrorStreamCaptureInvalidated:
            return "operation failed due to a previous error during capture";
        default:
            return cudaGetErrorName(code);
    }
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
    *function = dlsym(RTLD_DEFAULT, name);
    if (result != nullptr) {
        *result = *function == nullptr ? cudaDriverEntryPointSymbolNotFound : cudaDriverEntryPointSuccess;
    }
    return cudaSuccess;
}

}  // extern "C"
