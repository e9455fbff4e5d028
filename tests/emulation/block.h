// The state of a block that is running: its threads, what its warps exchange, and its shared memory.
#pragma once

#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "cuda_runtime.h"
#include "fiber.h"

namespace emulated {

constexpr unsigned int kWarp = 32;
constexpr size_t kMaxSharedBytes = 48 * 1024;  // without a kernel attribute, static and dynamic together
#if defined(EMULATED_SANITIZERS)
constexpr size_t kGuard = 0;  // AddressSanitizer has its own
#else
constexpr size_t kGuard = 128;  // bytes on both sides of a variable that nobody may write
#endif
constexpr unsigned char kGuardByte = 0xa5;

enum class State { kReady, kAtBarrier, kAtShuffle, kEnded };

struct Block;

struct Thread {
    Fiber fiber;
    Block* block = nullptr;
    unsigned int number = 0;  // within the block
    uint3 index{};
    State state = State::kEnded;
    const char* where = "";  // of the barrier or shuffle that it waits at
};

// The shuffle that lanes of a warp are gathering at.
struct Warp {
    uint32_t arrived = 0;
    uint32_t mask = 0;
    unsigned int offset = 0;
    const char* where = "";
    unsigned int generation = 0;  // of finished shuffles
    uint64_t values[2][kWarp];    // of the even and the odd generation: a slow lane still reads the one before
};

struct Variable {
    const void* key;
    std::string name;
    size_t bytes;
    std::unique_ptr<unsigned char[]> memory;  // guard, variable, guard

    unsigned char* data() const { return memory.get() + kGuard; }
    bool guards_are_whole() const {
        for (size_t i = 0; i < kGuard; ++i) {
            if (memory[i] != kGuardByte || data()[bytes + i] != kGuardByte) return false;
        }
        return true;
    }
};

struct Block {
    uint3 index{};
    std::deque<Thread> threads;  // the first `size` take part
    std::vector<Warp> warps;
    std::vector<Variable> variables;
    size_t size = 0;
    size_t waiting = 0;  // at the barrier
    size_t ended = 0;
    const char* barrier = "";
    size_t shared_bytes = 0;

    void add_variable(const void* key, const std::string& name, size_t bytes, unsigned char garbage) {
        shared_bytes += bytes;
        Variable variable{key, name, bytes, std::unique_ptr<unsigned char[]>(new unsigned char[bytes + 2 * kGuard])};
        std::memset(variable.memory.get(), kGuardByte, bytes + 2 * kGuard);
        std::memset(variable.data(), garbage, bytes);
        variables.push_back(std::move(variable));
    }
};

// "0", or "(1, 2, 0)".
inline std::string text_of(const uint3& index) {
    if (index.y == 0 && index.z == 0) return std::to_string(index.x);
    return "(" + std::to_string(index.x) + ", " + std::to_string(index.y) + ", " + std::to_string(index.z) + ")";
}

}  // namespace emulated
