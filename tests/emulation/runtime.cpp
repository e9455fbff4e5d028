// The scheduler behind cuda_runtime.h, and the C interface that device.py calls.
//
// Two blocks are resident at a time. With an even seed the thread that became ready last runs next, so that a warp runs
// ahead of the others as far as it can; with an odd seed any ready thread does. Blocks start in a random order. An
// error in a thread leaves its fiber for good, and the launch throws it.
#include <algorithm>
#include <map>
#include <mutex>
#include <random>
#include <stdexcept>

#include "block.h"
#include "cuda_runtime.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace emulated {
namespace {

constexpr size_t kResidentBlocks = 2;
constexpr unsigned int kMaxThreads = 1024;
constexpr unsigned int kMaxBlockDepth = 64;
constexpr unsigned int kMaxGridWidth = 2147483647;
constexpr unsigned int kMaxGridHeight = 65535;

// Work in the order of its stream: a launch or a memset.
struct Work {
    std::string name;
    std::function<void()> run;
};

std::mutex one_at_a_time;
uint64_t seed = 0;
std::mt19937_64 dice{0};
std::vector<std::string> log;                // of work that ran
std::map<std::string, unsigned int> limits;  // most blocks of a kernel
bool capturing = false;
std::vector<Work> captured;

// The launch that is running.
const Launch* launch = nullptr;
const std::function<void()>* body = nullptr;
Block blocks[kResidentBlocks];
std::vector<Thread*> ready;
Thread* current = nullptr;
std::string error;

// Even enough for small bounds, without a division.
size_t below(size_t bound) {
    return static_cast<size_t>((dice() >> 32) * bound >> 32);
}

bool same_place(const char* a, const char* b) {
    return a == b || std::strcmp(a, b) == 0;
}

unsigned char garbage() {
    return dice() % 2 == 0 ? 0xff : 0xcb;  // NaN, or a large negative number
}

std::string place_of(const Launch& where) {
    return std::string("emulated CUDA: ") + where.kernel + ", launched at " + where.where + ": ";
}

// --- errors ---------------------------------------------------------------------------------------------------------

// Threads that wait, by place, with the first of each.
std::string what_they_wait_for() {
    std::map<std::string, std::pair<size_t, const Thread*>> places;
    for (const Block& block : blocks) {
        for (size_t i = 0; i < block.size; ++i) {
            const Thread& thread = block.threads[i];
            std::string place = std::string(thread.state == State::kAtBarrier ? "at the barrier " : "at the shuffle ");
            place = thread.state == State::kEnded ? "have ended" : "wait " + place + thread.where;
            auto& entry =
                places.try_emplace("of block " + text_of(block.index) + " " + place, 0, &thread).first->second;
            ++entry.first;
        }
    }
    std::string text = "deadlock:";
    for (const auto& [place, entry] : places) {
        text += " " + std::to_string(entry.first) + " threads " + place + " (the first is thread " +
                text_of(entry.second->index) + ");";
    }
    text.pop_back();
    return text;
}

void check_launch(const Launch& wanted) {
    const auto refuse = [&](const std::string& text) { throw std::runtime_error(place_of(wanted) + text); };
    const dim3& block = wanted.block;
    const dim3& grid = wanted.grid;
    const uint64_t threads = uint64_t{block.x} * block.y * block.z;
    if (threads < 1 || threads > kMaxThreads || block.z > kMaxBlockDepth)
        refuse("a block has 1 to 1024 threads, at most 64 deep, and this one has " +
               text_of({block.x, block.y, block.z}));
    if (grid.x < 1 || grid.y < 1 || grid.z < 1 || grid.x > kMaxGridWidth || grid.y > kMaxGridHeight ||
        grid.z > kMaxGridHeight)
        refuse("a grid has at least one block and at most (2147483647, 65535, 65535), and this one has " +
               text_of({grid.x, grid.y, grid.z}));
    if (wanted.shared_bytes > kMaxSharedBytes)
        refuse("at most 49152 bytes of shared memory, and this launch asks for " + std::to_string(wanted.shared_bytes));
}

// --- running a launch -----------------------------------------------------------------------------------------------

void thread_main() {
    Fiber::entered();
    (*body)();
    Thread& thread = *current;
    thread.state = State::kEnded;
    ++thread.block->ended;
    thread.fiber.suspend(true);
}

void start(Block& block, uint64_t number) {
    const dim3& grid = launch->grid;
    const dim3& shape = launch->block;
    block.index = {static_cast<unsigned int>(number % grid.x), static_cast<unsigned int>(number / grid.x % grid.y),
                   static_cast<unsigned int>(number / grid.x / grid.y)};
    block.size = static_cast<size_t>(shape.x) * shape.y * shape.z;
    block.waiting = block.ended = block.shared_bytes = 0;
    block.warps.assign((block.size + kWarp - 1) / kWarp, Warp{});
    while (block.threads.size() < block.size) block.threads.emplace_back();
    if (launch->shared_bytes > 0) {
        block.add_variable(nullptr, "the dynamic shared memory", launch->shared_bytes, garbage());
    }
    const size_t first = ready.size();
    for (unsigned int i = 0; i < block.size; ++i) {
        Thread& thread = block.threads[i];
        thread.block = &block;
        thread.number = i;
        thread.index = {i % shape.x, i / shape.x % shape.y, i / (shape.x * shape.y)};
        thread.state = State::kReady;
        thread.fiber.start(&thread_main, i);
        ready.push_back(&thread);
    }
    std::shuffle(ready.begin() + static_cast<std::ptrdiff_t>(first), ready.end(), dice);
}

void finish(Block& block) {
    for (const Variable& variable : block.variables) {
        if (!variable.guards_are_whole()) {
            throw std::runtime_error(place_of(*launch) + "block " + text_of(block.index) + " has written outside of " +
                                     variable.name + ", " + std::to_string(variable.bytes) + " bytes");
        }
    }
    block.variables.clear();
    block.size = 0;
}

Thread& next_ready() {
    if (seed % 2 == 1) std::swap(ready[below(ready.size())], ready.back());
    Thread& thread = *ready.back();
    ready.pop_back();
    return thread;
}

void run_threads(std::vector<uint64_t>& waiting) {
    while (true) {
        for (Block& block : blocks) {
            if (block.size == 0 && !waiting.empty()) {
                start(block, waiting.back());
                waiting.pop_back();
            }
        }
        if (ready.empty()) {
            if (std::all_of(std::begin(blocks), std::end(blocks), [](const Block& b) { return b.size == 0; })) return;
            throw std::runtime_error(place_of(*launch) + what_they_wait_for());
        }
        current = &next_ready();
        threadIdx = current->index;
        blockIdx = current->block->index;
        Block& block = *current->block;
        current->fiber.resume();
        current = nullptr;
        if (!error.empty()) throw std::runtime_error(error);
        if (block.ended == block.size) finish(block);
    }
}

void run_launch(const Launch& wanted, const std::function<void()>& thread) {
    Launch mine = wanted;
    const auto limit = limits.find(std::string(mine.kernel).substr(0, std::string(mine.kernel).find('<')));
    if (limit != limits.end()) mine.grid.x = std::min(mine.grid.x, limit->second);
    launch = &mine;
    body = &thread;
    gridDim = mine.grid;
    blockDim = mine.block;
    error.clear();
    ready.clear();
    for (Block& block : blocks) {
        block.variables.clear();
        block.size = 0;
    }
    std::vector<uint64_t> numbers(uint64_t{mine.grid.x} * mine.grid.y * mine.grid.z);
    for (uint64_t i = 0; i < numbers.size(); ++i) numbers[i] = i;
    std::shuffle(numbers.begin(), numbers.end(), dice);
    run_threads(numbers);
}

void enqueue(Work work) {
    const std::lock_guard lock(one_at_a_time);
    if (capturing) {
        captured.push_back(std::move(work));
        return;
    }
    log.push_back(work.name);
    work.run();
}

// Lets the calling thread wait, or go on if it is the last of those that `wake` then makes ready.
void wait(State state, const char* where) {
    current->state = state;
    current->where = where;
    current->fiber.suspend();
}

void wake(Thread& thread) {
    thread.state = State::kReady;
    ready.push_back(&thread);
}

}  // namespace

void Launch::enqueue(std::function<void()> thread) const {
    check_launch(*this);
    emulated::enqueue(Work{kernel, [launch = *this, thread = std::move(thread)] { run_launch(launch, thread); }});
}

void memset_async(void* at, int value, size_t bytes) {
    enqueue(Work{"memset", [=] { std::memset(at, value, bytes); }});
}

// --- called by threads ----------------------------------------------------------------------------------------------

void fail(const std::string& text) {
    if (current == nullptr) throw std::runtime_error("emulated CUDA, on the host: " + text);
    error = place_of(*launch) + "block " + text_of(blockIdx) + ", thread " + text_of(threadIdx) + ": " + text;
    current->fiber.suspend(true);
    std::abort();
}

void check_launch_bounds(unsigned int most, const char* where) {
    if (current->block->size > most) {
        fail(std::string("__launch_bounds__ at ") + where + " allows " + std::to_string(most) +
             " threads, and the block has " + std::to_string(current->block->size));
    }
}

void check_alignment(const void* at, size_t bytes, const char* where) {
    if (reinterpret_cast<uintptr_t>(at) % bytes != 0) {
        fail("a load of " + std::to_string(bytes) + " bytes from an address that is not aligned to them, at " + where);
    }
}

void sync_threads(const char* where) {
    Block& block = *current->block;
    if (block.waiting > 0 && !same_place(block.barrier, where)) {
        fail(std::string("a barrier is not for all threads of the block: this one comes to ") + where +
             ", others wait at " + block.barrier);
    }
    block.barrier = where;
    if (++block.waiting < block.size) return wait(State::kAtBarrier, where);
    block.waiting = 0;
    for (size_t i = 0; i < block.size; ++i) {
        if (block.threads[i].state == State::kAtBarrier) wake(block.threads[i]);
    }
}

uint64_t shuffle_down(unsigned int mask, uint64_t mine, unsigned int offset, const char* where) {
    Block& block = *current->block;
    const unsigned int lane = current->number % kWarp;
    const unsigned int source = lane + offset < kWarp ? lane + offset : lane;
    Warp& warp = block.warps[current->number / kWarp];
    if ((mask >> lane & 1) == 0 || (mask >> source & 1) == 0) {
        fail(std::string("lane ") + std::to_string(lane) +
             " or the lane that it reads is not in the mask of the shuffle " + where);
    }
    if (warp.arrived != 0 && (warp.mask != mask || warp.offset != offset || !same_place(warp.where, where))) {
        fail(std::string("the lanes of a warp are at different shuffles: this one at ") + where + " by " +
             std::to_string(offset) + ", others at " + warp.where + " by " + std::to_string(warp.offset));
    }
    const unsigned int generation = warp.generation;
    warp.mask = mask;
    warp.offset = offset;
    warp.where = where;
    warp.values[generation % 2][lane] = mine;
    warp.arrived |= 1u << lane;
    if (warp.arrived != mask) {
        wait(State::kAtShuffle, where);
    } else {
        warp.arrived = 0;
        ++warp.generation;
        const size_t first = current->number - lane;
        for (unsigned int i = 0; i < kWarp; ++i) {
            if (i != lane && (mask >> i & 1) != 0) wake(block.threads[first + i]);
        }
    }
    return warp.values[generation % 2][source];
}

unsigned int atomic_add(unsigned int* at, unsigned int value) {
    const unsigned int before = *at;
    *at += value;
    return before;
}

void* shared_memory(const void* key, size_t bytes, const char* name, const char* where) {
    Block& block = *current->block;
    for (const Variable& variable : block.variables) {
        if (variable.key == key) return variable.data();
    }
    if (block.shared_bytes + bytes > kMaxSharedBytes) {
        fail(std::string("more than 49152 bytes of shared memory: ") + name + " at " + where + " takes " +
             std::to_string(bytes) + " beside " + std::to_string(block.shared_bytes));
    }
    block.add_variable(key, std::string(name) + " at " + where, bytes, garbage());
    return block.variables.back().data();
}

unsigned char* dynamic_shared_memory(const char* where) {
    if (launch->shared_bytes == 0) fail(std::string("the launch gave no dynamic shared memory to ") + where);
    return current->block->variables.front().data();
}

}  // namespace emulated

// --- called by device.py --------------------------------------------------------------------------------------------

#define EMULATED_INTERFACE extern "C" __attribute__((visibility("default")))

// Starts the sequence of random orders again.
EMULATED_INTERFACE void emulated_set_seed(uint64_t seed) {
    emulated::seed = seed;
    emulated::dice.seed(seed);
}

// Names of the launches and memsets that ran since the last call, one a line.
EMULATED_INTERFACE const char* emulated_take_log() {
    static std::string text;
    text.clear();
    for (const std::string& name : emulated::log) text += name + "\n";
    emulated::log.clear();
    return text.c_str();
}

// Lets launches of `kernel` have at most this many blocks across; 0 for no limit.
EMULATED_INTERFACE void emulated_limit_blocks(const char* kernel, unsigned int most) {
    if (most == 0) {
        emulated::limits.erase(kernel);
    } else {
        emulated::limits[kernel] = most;
    }
}

// From here on launches and memsets are kept in place of run.
EMULATED_INTERFACE void emulated_begin_capture() {
    emulated::captured.clear();
    emulated::capturing = true;
}

EMULATED_INTERFACE void emulated_end_capture() {
    emulated::capturing = false;
}

// Runs what the last capture kept, with the arguments of that time. The error, or null.
EMULATED_INTERFACE const char* emulated_replay() {
    static std::string text;
    try {
        for (const emulated::Work& work : emulated::captured) emulated::enqueue(work);
    } catch (const std::exception& error) {
        text = error.what();
        return text.c_str();
    }
    return nullptr;
}
