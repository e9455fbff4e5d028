// What dispatch.py calls.
#include <algorithm>
#include <cstring>

#include "state.h"

using namespace rehearsal;

namespace {

using Callback = void (*)(long);
Callback callback = nullptr;

// The number of an action of the harness. When no queue and no graph holds it any more it is told as released.
struct Ticket {
    explicit Ticket(long number) : number(number) {}
    Ticket(const Ticket&) = delete;
    Ticket& operator=(const Ticket&) = delete;
    ~Ticket() { state().released.push_back(number); }  // queues and graphs are changed under the lock only

    const long number;
};

}  // namespace

extern "C" {

void rehearsal_set_callback(Callback function) {
    callback = function;
}

void rehearsal_seed(unsigned seed) {
    Lock lock(state().mutex);
    state().dice.seed(seed);
}

// Queues the action with this number on the stream, or puts it into the stream's capture. Returns a CUDA error.
int rehearsal_submit(cudaStream_t handle, long number) {
    Lock lock(state().mutex);
    Stream* const stream = find_stream(handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    ++state().counts["operators"];
    auto ticket = std::make_shared<Ticket>(number);
    return submit(*stream, [ticket] { callback(ticket->number); }, "an operator");
}

void rehearsal_drain(cudaStream_t handle) {
    Lock lock(state().mutex);
    drain(*find_stream(handle), lock);
}

// What comes later on `after` waits for all that `before` has been given.
void rehearsal_order(cudaStream_t before, cudaStream_t after) {
    Lock lock(state().mutex);
    Stream* const first = find_stream(before);
    Stream* const second = find_stream(after);
    const auto event = std::make_shared<Event>();
    first->queue.push_back({.record = event, .number = 1});
    ++first->queued;
    second->queue.push_back({.wait = event, .number = 1});
    ++second->queued;
}

void rehearsal_drain_all() {
    Lock lock(state().mutex);
    for (int device = 0; device < state().devices; ++device) drain_device(device, lock);
}

int rehearsal_is_capturing(cudaStream_t handle) {
    Lock lock(state().mutex);
    return find_stream(handle)->capture != nullptr;
}

// The serial number of the allocation at the address, 0 if it is not memory of a device.
unsigned long rehearsal_block(const void* address, int* device) {
    Lock lock(state().mutex);
    const Block* const block = find_block(address);
    if (block != nullptr) *device = block->device;
    return block == nullptr ? 0 : block->serial;
}

int rehearsal_is_pinned(const void* address) {
    Lock lock(state().mutex);
    return is_pinned(address);
}

// Numbers of actions that can never run again, at most `room`; returns how many.
int rehearsal_take_released(long* numbers, int room) {
    Lock lock(state().mutex);
    auto& released = state().released;
    const int count = static_cast<int>(std::min<size_t>(room, released.size()));
    std::copy(released.end() - count, released.end(), numbers);
    released.resize(released.size() - count);
    return count;
}

// Takes the oldest complaint into `text`; returns whether there was one.
int rehearsal_take_complaint(char* text, int room) {
    Lock lock(state().mutex);
    if (state().complaints.empty()) return 0;
    std::strncpy(text, state().complaints.front().c_str(), room - 1);
    text[room - 1] = '\0';
    state().complaints.erase(state().complaints.begin());
    return 1;
}

// A function of CUDA that this runtime does not have.
int rehearsal_not_modelled(const char* name) {
    Lock lock(state().mutex);
    complain(std::string(name) + " is not modelled");
    return fail(cudaErrorNotSupported, name);
}

// The call that made the device's context; empty if the device has none.
const char* rehearsal_context(int device) {
    Lock lock(state().mutex);
    return state().contexts[device].c_str();
}

long rehearsal_count(const char* what) {
    Lock lock(state().mutex);
    return state().counts[what];
}

}  // extern "C"
