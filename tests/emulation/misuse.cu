// Kernels that do what CUDA leaves undefined, for tooling/test_emulator.py: each must be reported, not hang or pass.
#include <cuda_runtime.h>

#include <exception>
#include <map>
#include <string>

namespace {

__global__ void nothing() {}

__global__ void __launch_bounds__(64) bounded() {}

__global__ void half_at_the_barrier() {
    if (threadIdx.x < 32) __syncthreads();
}

__global__ void two_barriers() {
    if (threadIdx.x < 32) {
        __syncthreads();
    } else {
        __syncthreads();
    }
}

__global__ void half_at_the_shuffle() {
    if (threadIdx.x < 16) __shfl_down_sync(0xffffffffu, 1, 1);
    __syncthreads();
}

__global__ void two_shuffles() {
    if (threadIdx.x < 16) {
        __shfl_down_sync(0xffffffffu, 1, 1);
    } else {
        __shfl_down_sync(0xffffffffu, 1, 1);
    }
}

__global__ void two_offsets() {
    __shfl_down_sync(0xffffffffu, 1, threadIdx.x < 16 ? 1 : 2);
}

__global__ void outside_of_the_mask() {
    if (threadIdx.x < 16) __shfl_down_sync(0x0000ffffu, 1, 8);
}

__global__ void misaligned_load(const float* memory) {
    __ldg(reinterpret_cast<const uint4*>(memory + 1));
}

__global__ void misaligned_store(float* memory) {
    *reinterpret_cast<uint4*>(memory + 1) = uint4{1, 2, 3, 4};
}

__global__ void index_too_large(int count) {
    __shared__ int values[32];
    values[count] = 1;
}

__global__ void pointer_too_far(int count) {
    extern __shared__ __align__(16) unsigned char bytes[];
    bytes[count] = 1;
}

__global__ void too_much_shared_memory() {
    __shared__ double many[40 * 160];
    many[threadIdx.x] = 1;
}

__global__ void shared_memory_starts_as(float* result) {
    __shared__ float value;
    *result = value;
}

alignas(16) float memory[8];

using Case = void (*)();
const std::map<std::string, Case> kCases = {
    {"nothing", [] { nothing<<<3, dim3(4, 2, 2), 0, nullptr>>>(); }},
    {"too many threads", [] { nothing<<<1, 1025, 0, nullptr>>>(); }},
    {"too deep a block", [] { nothing<<<1, dim3(1, 1, 65), 0, nullptr>>>(); }},
    {"no blocks", [] { nothing<<<0, 32, 0, nullptr>>>(); }},
    {"too high a grid", [] { nothing<<<dim3(1, 65536), 32, 0, nullptr>>>(); }},
    {"too much dynamic shared memory", [] { nothing<<<1, 32, 48 * 1024 + 1, nullptr>>>(); }},
    {"more threads than the launch bounds", [] { bounded<<<1, 65, 0, nullptr>>>(); }},
    {"half at the barrier", [] { half_at_the_barrier<<<1, 64, 0, nullptr>>>(); }},
    {"two barriers", [] { two_barriers<<<1, 64, 0, nullptr>>>(); }},
    {"half at the shuffle", [] { half_at_the_shuffle<<<1, 64, 0, nullptr>>>(); }},
    {"two shuffles", [] { two_shuffles<<<1, 32, 0, nullptr>>>(); }},
    {"two offsets", [] { two_offsets<<<1, 32, 0, nullptr>>>(); }},
    {"outside of the mask", [] { outside_of_the_mask<<<1, 32, 0, nullptr>>>(); }},
    {"misaligned load", [] { misaligned_load<<<1, 1, 0, nullptr>>>(memory); }},
    {"misaligned store", [] { misaligned_store<<<1, 1, 0, nullptr>>>(memory); }},
    {"index too large", [] { index_too_large<<<1, 1, 0, nullptr>>>(32); }},
    {"pointer too far", [] { pointer_too_far<<<1, 1, 64, nullptr>>>(64); }},
    {"no dynamic shared memory", [] { pointer_too_far<<<1, 1, 0, nullptr>>>(0); }},
    {"too much shared memory", [] { too_much_shared_memory<<<1, 32, 0, nullptr>>>(); }},
};

}  // namespace

// The error of a case, or null.
extern "C" __attribute__((visibility("default"))) const char* misuse(const char* name) {
    static std::string text;
    try {
        kCases.at(name)();
    } catch (const std::exception& error) {
        text = error.what();
        return text.c_str();
    }
    return nullptr;
}

// What the first thread of a block finds in shared memory.
extern "C" __attribute__((visibility("default"))) float garbage() {
    float result = 0;
    shared_memory_starts_as<<<1, 1, 0, nullptr>>>(&result);
    return result;
}
