// Memory: that of a device is host memory, filled with 0xFF (NaN) when it is allocated.
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>

#include "state.h"

namespace rehearsal {

namespace {

constexpr size_t kTotal = size_t{16} << 30;  // of a device
constexpr size_t kPage = 4096;
constexpr size_t kMostFilled = size_t{20} << 20;  // larger blocks stay zero, to save time

size_t rounded(size_t bytes) {
    return (bytes + kPage - 1) / kPage * kPage;
}

size_t in_use(int device) {
    size_t sum = 0;
    for (const auto& [address, block] : state().device_memory) sum += block.device == device ? block.bytes : 0;
    return sum;
}

}  // namespace

const Block* find_block(const void* address) {
    const auto* const at = static_cast<const char*>(address);
    auto found = state().device_memory.upper_bound(at);
    if (found == state().device_memory.begin()) return nullptr;
    --found;
    return at < found->first + found->second.bytes ? &found->second : nullptr;
}

bool is_pinned(const void* address) {
    const auto* const at = static_cast<const char*>(address);
    auto found = state().pinned_memory.upper_bound(at);
    if (found == state().pinned_memory.begin()) return false;
    --found;
    return at < found->first + found->second;
}

}  // namespace rehearsal

using namespace rehearsal;

namespace {

cudaError_t capture_unsupported(const char* call) {
    return fail(cudaErrorStreamCaptureUnsupported, std::string(call) + " is not permitted in a capture");
}

// A copy or a fill as a stream does it. Within an operator it has no effect of its own: the harness queues the
// operator as a whole.
cudaError_t transfer(cudaStream_t handle, Action run, const char* call) {
    note_stream(handle);
    Stream* const stream = find_stream(handle);
    if (stream == nullptr) return fail(cudaErrorInvalidResourceHandle, call);
    if (within_operator()) return check_capture(*stream, call);
    return submit(*stream, std::move(run), call);
}

// A copy with pageable memory: the source is read at once, and the call returns when the destination is written.
cudaError_t copy_pageable(void* to, const void* from, size_t bytes, cudaStream_t handle, Lock& lock) {
    Stream* const stream = find_stream(handle);
    if (stream == nullptr) return fail(cudaErrorInvalidResourceHandle, "cudaMemcpyAsync");
    if (stream->capture != nullptr) {
        break_capture(*stream->capture, "a copy of pageable memory in a capture");
        return capture_unsupported("a copy of pageable memory");
    }
    if (find_block(to) == nullptr) {
        note_stream(handle);
        drain(*stream, lock);
        if (!within_operator()) std::memcpy(to, from, bytes);
        return cudaSuccess;
    }
    const auto* const first = static_cast<const char*>(from);
    auto kept = std::make_shared<std::vector<char>>(first, first + bytes);
    return transfer(handle, [to, kept] { std::memcpy(to, kept->data(), kept->size()); }, "cudaMemcpyAsync");
}

}  // namespace

extern "C" {

cudaError_t cudaMalloc(void** address, size_t bytes) {
    Lock lock(state().mutex);
    touch_context(current_device(), "cudaMalloc");
    if (prohibited("cudaMalloc")) return capture_unsupported("cudaMalloc");
    bytes = rounded(bytes);
    if (in_use(current_device()) + bytes > kTotal) return fail(cudaErrorMemoryAllocation, "cudaMalloc");
    void* const made = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (made == MAP_FAILED) return fail(cudaErrorMemoryAllocation, "cudaMalloc");
    if (bytes <= kMostFilled) std::memset(made, 0xFF, bytes);
    state().device_memory[static_cast<char*>(made)] = {bytes, current_device(), ++state().serials};
    *address = made;
    return cudaSuccess;
}

cudaError_t cudaFree(void* address) {
    Lock lock(state().mutex);
    touch_context(current_device(), "cudaFree");
    if (address == nullptr) return cudaSuccess;
    if (prohibited("cudaFree")) return capture_unsupported("cudaFree");
    const auto found = state().device_memory.find(static_cast<char*>(address));
    if (found == state().device_memory.end()) return fail(cudaErrorInvalidValue, "cudaFree of what is not allocated");
    const Block block = found->second;
    drain_device(block.device, lock);
    state().device_memory.erase(static_cast<char*>(address));
    munmap(address, block.bytes);
    return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** address, size_t bytes, unsigned) {
    Lock lock(state().mutex);
    touch_context(current_device(), "cudaHostAlloc");
    if (prohibited("cudaHostAlloc")) return capture_unsupported("cudaHostAlloc");
    *address = std::aligned_alloc(kPage, rounded(bytes));
    state().pinned_memory[static_cast<char*>(*address)] = rounded(bytes);
    return cudaSuccess;
}

cudaError_t cudaFreeHost(void* address) {
    Lock lock(state().mutex);
    if (prohibited("cudaFreeHost")) return capture_unsupported("cudaFreeHost");
    if (state().pinned_memory.erase(static_cast<char*>(address)) == 0)
        return fail(cudaErrorInvalidValue, "cudaFreeHost");
    std::free(address);
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* available, size_t* total) {
    Lock lock(state().mutex);
    touch_context(current_device(), "cudaMemGetInfo");
    *total = kTotal;
    *available = kTotal - in_use(current_device());
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
    Lock lock(state().mutex);
    *attributes = {};
    const Block* const block = find_block(address);
    attributes->type = block != nullptr     ? cudaMemoryTypeDevice
                       : is_pinned(address) ? cudaMemoryTypeHost
                                            : cudaMemoryTypeUnregistered;
    attributes->device = block != nullptr ? block->device : current_device();
    attributes->devicePointer = attributes->hostPointer = const_cast<void*>(address);
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
    Lock lock(state().mutex);
    const auto reachable = [](const void* address) { return find_block(address) != nullptr || is_pinned(address); };
    if (!reachable(to) || !reachable(from)) return copy_pageable(to, from, bytes, stream, lock);
    return transfer(stream, [=] { std::memcpy(to, from, bytes); }, "cudaMemcpyAsync");
}

cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
    return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream);
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
    Lock lock(state().mutex);
    touch_context(current_device(), "cudaMemcpy");
    if (prohibited("cudaMemcpy")) return capture_unsupported("cudaMemcpy");
    ++state().counts["waits"];
    drain(*find_stream(nullptr), lock);
    if (!within_operator()) std::memcpy(to, from, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
    Lock lock(state().mutex);
    return transfer(stream, [=] { std::memset(to, value, bytes); }, "cudaMemsetAsync");
}

cudaError_t cudaMemset(void* to, int value, size_t bytes) {
    return cudaMemsetAsync(to, value, bytes, nullptr);
}

}  // extern "C"
