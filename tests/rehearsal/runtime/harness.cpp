// What dispatch.py calls.
#include <algorithm>
#include <cstring>

#include "state.h"

using namespace rehearsal;

namespace {

using Callback = void (*)(long);
Callback callback = nullptr;

using Memory = std::vector<std::pair<const void*, std::uint64_t>>;  // addresses with the serial numbers of their blocks

// An action of the harness. When no queue and no graph holds it any more its number is given back as released.
struct Ticket {
    Ticket(long number, Memory memory) : number(number), memory(std::move(memory)) {}
    Ticket(const Ticket&) = delete;
    Ticket& operator=(const Ticket&) = delete;
    ~Ticket() { state().released.push_back(number); }  // queues and graphs are changed under the lock only

    const long number;
    const Memory memory;
};

// The blocks of memory that an action touches, which complains about those of another device, and of none.
Memory find_memory(const void* const* addresses, int count, int device) {
    Memory memory;
    for (int i = 0; i < count; ++i) {
        const Block* const block = find_block(addresses[i]);
        if (block == nullptr) {
            complain("an operator is given a CUDA tensor in memory that no device has");
            continue;
        }
        if (device >= 0 && block->device != device) {
            complain("an operator on GPU " + std::to_string(device) + " is given memory of GPU " +
                     std::to_string(block->device));
        }
        memory.emplace_back(addresses[i], block->serial);
    }
    return memory;
}

bool is_alive(const Memory& memory) {
    Lock lock(state().mutex);
    for (const auto& [address, serial] : memory) {
        const Block* const block = find_block(address);
        if (block != nullptr && block->serial == serial) continue;
        complain("an operator reads or writes memory that has been freed");
        return false;
    }
    return true;
}

void perform(const Ticket& ticket) {
    if (is_alive(ticket.memory)) callback(ticket.number);
}

}  // namespace

extern "C" {

void rehearsal_set_callback(Callback function) {
    callback = function;
}

void rehearsal_seed(unsigned seed) {
    Lock lock(state().mutex);
    state().dice.seed(seed);
}

// Queues an action on a stream of `device`, or puts it into the stream's capture. It touches memory at `count`
// addresses, which must be of that device, or of any if `across`, and still be allocated when the action runs. Returns
// a CUDA error.
int rehearsal_submit(int device, cudaStream_t handle, long number, const void* const* addresses, int count,
                     int across) {
    Lock lock(state().mutex);
    Stream* const stream = find_stream(handle, device);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    ++state().counts["operators"];
    auto ticket = std::make_shared<Ticket>(number, find_memory(addresses, count, across != 0 ? -1 : device));
    return submit(*stream, [ticket] { perform(*ticket); }, "an operator");
}

void rehearsal_drain(int device, cudaStream_t handle) {
    Lock lock(state().mutex);
    drain(*find_stream(handle, device), lock);
}

// What comes later on the stream `after` waits for all that `before` has been given.
void rehearsal_order(int device_before, cudaStream_t before, int device_after, cudaStream_t after) {
    Lock lock(state().mutex);
    Stream* const first = find_stream(before, device_before);
    Stream* const second = find_stream(after, device_after);
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

int rehearsal_is_capturing(int device, cudaStream_t handle) {
    Lock lock(state().mutex);
    return find_stream(handle, device)->capture != nullptr;
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
