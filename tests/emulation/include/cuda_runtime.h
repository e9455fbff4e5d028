// A stand-in for the CUDA toolkit's header of this name: kernels compiled with it are plain C++ and run on the CPU.
//
// runtime.cpp runs the threads of a block as fibers of one OS thread, which switch at barriers and shuffles only. The
// seed chooses the order of blocks and threads. Behaviour that CUDA leaves undefined is an error with file and line.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>

struct uint3 {
    unsigned int x, y, z;
};
struct dim3 {
    unsigned int x, y, z;
    dim3(unsigned int x = 1, unsigned int y = 1, unsigned int z = 1) : x(x), y(y), z(z) {}
};
struct alignas(16) uint4 {
    unsigned int x, y, z, w;
};
using cudaStream_t = void*;

// Set before a thread runs; hidden, so that several emulated libraries in one process have their own.
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __align__(bytes) alignas(bytes)
#define EMULATED_TEXT_OF(x) #x
#define EMULATED_TEXT(x) EMULATED_TEXT_OF(x)
#define EMULATED_HERE __FILE__ ":" EMULATED_TEXT(__LINE__)

namespace emulated {

constexpr size_t kMaxParameterBytes = 32764;  // CUDA 12.1 and later

// What a launch asks for, in the order of <<<...>>>.
struct Launch {
    const char* kernel;
    const char* where;
    dim3 grid;
    dim3 block;
    size_t shared_bytes;

    Launch(const char* kernel, const char* where, dim3 grid, dim3 block, size_t shared_bytes = 0,
           cudaStream_t = nullptr)
        : kernel(kernel), where(where), grid(grid), block(block), shared_bytes(shared_bytes) {}

    // Copies the arguments, as a CUDA launch does, and runs the kernel or adds it to the capture.
    template <typename... Parameters, typename... Arguments>
    void operator()(void (*function)(Parameters...), Arguments&&... arguments) const {
        static_assert((std::is_trivially_copyable_v<std::decay_t<Parameters>> && ...));
        static_assert((sizeof(std::decay_t<Parameters>) + ... + 0) <= kMaxParameterBytes);
        auto copies = std::make_shared<const std::tuple<std::decay_t<Parameters>...>>(
            static_cast<std::decay_t<Parameters>>(arguments)...);
        enqueue([function, copies] { std::apply(function, *copies); });
    }

 private:
    void enqueue(std::function<void()> thread) const;
};

// --- called by threads ----------------------------------------------------------------------------------------------

[[noreturn]] void fail(const std::string& text);
void check_launch_bounds(unsigned int most, const char* where);
void sync_threads(const char* where);
// The value that lane + offset passes, or this lane's own past the warp's end. All lanes of `mask` have to come.
uint64_t shuffle_down(unsigned int mask, uint64_t mine, unsigned int offset, const char* where);
unsigned int atomic_add(unsigned int* at, unsigned int value);
// This block's memory for the variable that `key` identifies. Its content is garbage at first.
void* shared_memory(const void* key, size_t bytes, const char* name, const char* where);
unsigned char* dynamic_shared_memory(const char* where);
void check_alignment(const void* at, size_t bytes, const char* where);

template <typename T>
T& shared(const void* key, const char* name, const char* where) {
    return *static_cast<T*>(shared_memory(key, sizeof(T), name, where));
}

template <typename T>
T shuffle_down_any(unsigned int mask, const T& value, unsigned int offset, const char* where) {
    static_assert(sizeof(T) <= sizeof(uint64_t) && std::is_arithmetic_v<T>);
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof(T));
    bits = shuffle_down(mask, bits, offset, where);
    T theirs;
    std::memcpy(&theirs, &bits, sizeof(T));
    return theirs;
}

template <typename T>
T load(const T* at, const char* where) {
    check_alignment(at, alignof(T), where);
    return *at;
}

// --- called by launchers --------------------------------------------------------------------------------------------

struct DeviceGuard {
    explicit DeviceGuard(int) {}
};
// There is one stream, and it is always done.
inline int32_t current_stream(int32_t, void** stream) {
    *stream = nullptr;
    return 0;
}
void memset_async(void* at, int value, size_t bytes);

}  // namespace emulated

#define __syncthreads() emulated::sync_threads(EMULATED_HERE)
#define __shfl_down_sync(mask, value, offset) \
    emulated::shuffle_down_any(mask, value, static_cast<unsigned int>(offset), EMULATED_HERE)
#define __ldg(pointer) emulated::load(pointer, EMULATED_HERE)
#define __ldcg(pointer) emulated::load(pointer, EMULATED_HERE)
#define EMULATED_CHECK(call) ((void)(call))
#define EMULATED_LAUNCH_CHECK() ((void)0)

// Blocks run in turn, and an OS thread sees its own writes in order.
inline void __threadfence() {}
inline unsigned int atomicAdd(unsigned int* at, unsigned int value) {
    return emulated::atomic_add(at, value);
}
template <typename T>
T min(T a, T b) {
    return b < a ? b : a;
}
inline float __fmaf_rn(float a, float b, float c) {
    return std::fma(a, b, c);
}
inline unsigned int __float_as_uint(float x) {
    unsigned int bits;
    std::memcpy(&bits, &x, sizeof(bits));
    return bits;
}
inline float __uint_as_float(unsigned int bits) {
    float x;
    std::memcpy(&x, &bits, sizeof(x));
    return x;
}
inline void cudaMemsetAsync(void* at, int value, size_t bytes, cudaStream_t) {
    emulated::memset_async(at, value, bytes);
}
