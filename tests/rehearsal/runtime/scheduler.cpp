// The order in which queued work is done: any that streams and events allow, chosen at random.
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "state.h"

namespace rehearsal {

namespace {

bool is_busy(const Stream& stream) {
    return stream.worker != std::thread::id{};
}

bool is_ready(const Stream& stream) {
    if (is_busy(stream) || stream.queue.empty()) return false;
    const Entry& entry = stream.queue.front();
    return entry.wait == nullptr || entry.wait->passed >= entry.number;
}

// The action of a random node that comes next in the graph.
Action take_node(GraphLaunch& launch) {
    std::vector<size_t> ready;
    for (size_t i = 0; i < launch.done.size(); ++i) {
        const auto& after = launch.graph->nodes[i].after;
        const auto is_done = [&](size_t other) { return launch.done[other]; };
        if (!launch.done[i] && std::all_of(after.begin(), after.end(), is_done)) ready.push_back(i);
        if (ready.size() > 3) break;  // enough to choose from
    }
    const size_t node = ready[state().dice() % ready.size()];
    launch.done[node] = true;
    --launch.left;
    return launch.graph->nodes[node].run;
}

// Does the first entry of a stream that is ready, or one node of it; the lock is open meanwhile.
void step(Stream& stream, Lock& lock) {
    Entry& entry = stream.queue.front();  // stays where it is while others are put behind it
    Action run = entry.run;
    if (entry.launch != nullptr && entry.launch->left > 0) run = take_node(*entry.launch);
    if (run) {
        stream.worker = std::this_thread::get_id();
        lock.unlock();
        run();
        lock.lock();
        stream.worker = {};
    }
    if (entry.launch != nullptr && entry.launch->left > 0) return;
    if (entry.record != nullptr) {
        entry.record->passed = std::max(entry.record->passed, entry.number);
        entry.record->time = std::chrono::steady_clock::now();
    }
    stream.queue.pop_front();
    ++stream.done;
}

// Lets other threads work; also those that need Python's lock, if this thread holds it.
void pause(Lock& lock) {
    static const auto holds = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
    static const auto save = reinterpret_cast<void* (*)()>(dlsym(RTLD_DEFAULT, "PyEval_SaveThread"));
    static const auto restore = reinterpret_cast<void (*)(void*)>(dlsym(RTLD_DEFAULT, "PyEval_RestoreThread"));
    lock.unlock();
    void* const python = holds != nullptr && holds() != 0 ? save() : nullptr;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
    if (python != nullptr) restore(python);
    lock.lock();
}

[[noreturn]] void stuck() {
    std::fprintf(stderr, "rehearsal: every stream waits for an event that no stream will reach\n");
    for (const Stream* stream : all_streams()) {
        std::fprintf(stderr, "  a stream of device %d with %zu entries\n", stream->device, stream->queue.size());
    }
    std::abort();
}

bool busy_elsewhere() {
    for (const Stream* stream : all_streams()) {
        if (is_busy(*stream) && stream->worker != std::this_thread::get_id()) return true;
    }
    return false;
}

// An action may call CUDA in turn, as the collector of garbage does; it must not wait for itself.
bool is_own(const Stream& stream) {
    return stream.worker == std::this_thread::get_id();
}

}  // namespace

// A stream runs ahead of the others, or stays behind, for as long as ranks stay as they are. Evenly mixed streams would
// hardly ever show that one of them does not wait for another.
bool step_any(Lock& lock) {
    constexpr unsigned kSteps = 48;  // of all streams, on average, until a stream's rank changes
    std::vector<Stream*> ready;
    for (Stream* stream : all_streams()) {
        if (stream->rank == 0 || state().dice() % kSteps == 0) stream->rank = 1 + state().dice() % 1000;
        if (is_ready(*stream)) ready.push_back(stream);
    }
    if (ready.empty()) return false;
    const auto lower = [](const Stream* one, const Stream* other) { return one->rank < other->rank; };
    step(**std::max_element(ready.begin(), ready.end(), lower), lock);
    return true;
}

void work_until(const std::function<bool()>& done, Lock& lock) {
    while (!done()) {
        if (step_any(lock)) continue;
        if (!busy_elsewhere()) stuck();
        pause(lock);
    }
}

void drain(Stream& stream, Lock& lock) {
    const std::uint64_t target = stream.queued;
    work_until([&] { return stream.done >= target || is_own(stream); }, lock);
}

void drain_device(int device, Lock& lock) {
    for (Stream* stream : all_streams()) {
        if (stream->device == device) drain(*stream, lock);
    }
}

}  // namespace rehearsal
