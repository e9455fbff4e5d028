// Kernels: registered by name, checked when they are launched, and never done. Their effect comes from the harness.
#include <cstring>

#include "state.h"

namespace rehearsal {

namespace {

struct LaunchShape {
    dim3 grid;
    dim3 block;
    size_t shared_bytes;
    cudaStream_t stream;
};

thread_local LaunchShape pushed;  // between <<<...>>> and the stub that nvcc made of the kernel
thread_local bool operating = false;
thread_local std::vector<cudaStream_t> used;

std::map<const void*, std::string>& kernel_names() {
    static auto* const names = new std::map<const void*, std::string>;
    return *names;
}

bool is_possible(const LaunchShape& shape) {
    const auto in = [](unsigned value, unsigned max) { return value >= 1 && value <= max; };
    const dim3& g = shape.grid;
    const dim3& b = shape.block;
    return in(g.x, 2147483647) && in(g.y, 65535) && in(g.z, 65535) && in(b.x, 1024) && in(b.y, 1024) && in(b.z, 64) &&
           b.x * b.y * b.z <= 1024 && shape.shared_bytes <= 232448;
}

std::string name_of(const void* kernel) {
    const auto found = kernel_names().find(kernel);
    return found == kernel_names().end() ? "a kernel without a name" : found->second;
}

cudaError_t launch(const void* kernel, const LaunchShape& shape) {
    Lock lock(state().mutex);
    touch_context(current_device(), "cudaLaunchKernel");
    ++state().counts["kernel launches"];
    if (!is_possible(shape)) return fail(cudaErrorInvalidConfiguration, "the shape of a launch: " + name_of(kernel));
    Stream* const stream = find_stream(shape.stream);
    if (stream == nullptr || stream->device != current_device()) {
        return fail(cudaErrorInvalidResourceHandle, "a launch on a stream of another device: " + name_of(kernel));
    }
    note_stream(shape.stream);
    if (operating) return check_capture(*stream, "cudaLaunchKernel");
    if (name_of(kernel).find("spin_kernel") == std::string::npos) {
        complain("a kernel is launched outside any operator, so that its effect is missing: " + name_of(kernel));
    }
    return submit(*stream, [] {}, "cudaLaunchKernel");
}

}  // namespace

bool within_operator() {
    return operating;
}

void note_stream(cudaStream_t stream) {
    for (const cudaStream_t known : used) {
        if (known == stream) return;
    }
    if (operating) used.push_back(stream);
}

}  // namespace rehearsal

using namespace rehearsal;

extern "C" {

// --- for the harness
void rehearsal_begin_operator() {
    operating = true;
    used.clear();
}

// Ends the operator; the number of streams that it used, the first of them in `stream`.
int rehearsal_end_operator(cudaStream_t* stream) {
    operating = false;
    if (!used.empty()) *stream = used.front();
    return static_cast<int>(used.size());
}

// --- for code that nvcc compiled
void** __cudaRegisterFatBinary(void*) {
    static void* handle[4];
    return handle;
}

void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaInitModule(void**) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

void __cudaRegisterFunction(void**, const char* stub, char*, const char* name, int, void*, void*, void*, void*, int*) {
    Lock lock(state().mutex);
    kernel_names()[stub] = name;
}

cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* stub) {
    *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(stub));
    return cudaSuccess;
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, struct CUstream_st* stream) {
    pushed = {grid, block, shared_bytes, stream};
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
    *grid = pushed.grid;
    *block = pushed.block;
    *shared_bytes = pushed.shared_bytes;
    std::memcpy(stream, &pushed.stream, sizeof pushed.stream);
    return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void**, size_t bytes, cudaStream_t stream) {
    return launch(kernel, {grid, block, bytes, stream});
}

cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void**, size_t bytes, cudaStream_t stream) {
    return launch(kernel, {grid, block, bytes, stream});
}

cudaError_t cudaLaunchCooperativeKernel(const void* kernel, dim3 grid, dim3 block, void**, size_t bytes,
                                        cudaStream_t stream) {
    return launch(kernel, {grid, block, bytes, stream});
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void**) {
    return launch(kernel, {config->gridDim, config->blockDim, config->dynamicSmemBytes, config->stream});
}

// --- what torch asks about kernels
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
    *attributes = {};
    attributes->maxThreadsPerBlock = 1024;
    attributes->binaryVersion = attributes->ptxVersion = 90;
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
    *blocks = 4;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
    *blocks = 4;
    return cudaSuccess;
}

cudaError_t cudaGetSymbolAddress(void** address, const void*) {
    static char room[4096];
    *address = room;
    return cudaSuccess;
}

cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) {
    return cudaSuccess;
}

}  // extern "C"
