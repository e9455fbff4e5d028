// State of the fake CUDA runtime: streams, events, captures, graphs and memory of all devices, guarded by one lock.
//
// Device memory is host memory and kernels do nothing. A stream is a queue whose entries are done late, by whichever
// thread waits for something, in an order that is random within the rules of CUDA. What an operator does to memory
// comes from the dispatch mode in dispatch.py, which queues it through harness.cpp.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace rehearsal {

constexpr int kMaxDevices = 2;

using Action = std::function<void()>;
using Lock = std::unique_lock<std::mutex>;

struct Node {
    Action run;
    std::vector<size_t> after;  // indices of the nodes that come before it
};

struct Graph {
    std::vector<Node> nodes;
};

// A graph that is under way on a stream.
struct GraphLaunch {
    std::shared_ptr<const Graph> graph;
    std::vector<bool> done;
    size_t left;
};

struct Capture {
    std::uint64_t id;
    cudaStreamCaptureMode mode;
    std::thread::id thread;
    std::shared_ptr<Graph> graph = std::make_shared<Graph>();
    bool broken = false;
    bool over = false;
};

struct Event {
    int device;
    std::uint64_t recorded = 0;  // number of the newest record
    std::uint64_t passed = 0;    // number of the newest record that its stream has reached
    std::chrono::steady_clock::time_point time;
    std::shared_ptr<Capture> capture;  // set if the newest record was captured
    std::vector<size_t> nodes;         // of the capture, which the event comes after
};

// A place in a stream's queue: at most one of the four members with a value.
struct Entry {
    Action run{};
    std::shared_ptr<GraphLaunch> launch{};
    std::shared_ptr<Event> record{};
    std::shared_ptr<Event> wait{};
    std::uint64_t number = 0;  // of the event's record
};

struct Stream {
    int device;
    std::deque<Entry> queue{};
    std::uint64_t queued = 0;
    std::uint64_t done = 0;
    unsigned rank = 0;                   // the stream with the highest rank goes first; ranks change at random
    std::thread::id worker{};            // the thread that does the first entry right now, if any
    std::shared_ptr<Capture> capture{};  // set while the stream is capturing
    std::vector<size_t> frontier{};      // nodes of the capture that the stream's next node comes after
};

struct Block {
    size_t bytes;
    int device;
    std::uint64_t serial;  // different for each allocation, also if the address is the same
};

struct State {
    std::mutex mutex;
    int devices = 1;
    std::mt19937 dice{1};
    std::map<cudaStream_t, std::unique_ptr<Stream>> streams;
    std::unique_ptr<Stream> default_stream[kMaxDevices];
    std::map<cudaEvent_t, std::shared_ptr<Event>> events;
    std::map<cudaGraph_t, std::shared_ptr<const Graph>> graphs;
    std::map<cudaGraphExec_t, std::shared_ptr<const Graph>> executables;
    std::map<const char*, Block> device_memory;
    std::map<const char*, size_t> pinned_memory;
    std::uint64_t serials = 0;
    std::string contexts[kMaxDevices];  // the call that made the device's primary context; empty if there is none
    std::map<std::string, long> counts;
    std::vector<std::string> complaints;
    std::vector<long> released;  // numbers of actions of the harness that can never run again
};

State& state();

// --- devices.cpp
int current_device();
void touch_context(int device, const char* call);
// Sets the thread's last error and writes down why; returns `code`.
cudaError_t fail(cudaError_t code, const std::string& why);
// Writes down what no return code of CUDA tells; the harness fails the test.
void complain(const std::string& what);

// --- streams.cpp
// The stream of a handle, nullptr if there is none; 0 and cudaStreamLegacy are the device's default stream.
Stream* find_stream(cudaStream_t handle, int device = current_device());
std::vector<Stream*> all_streams();
// Puts an action on a stream or into its capture.
cudaError_t submit(Stream& stream, Action run, const char* call);
// An error if the stream's capture is broken.
cudaError_t check_capture(const Stream& stream, const char* call);

// --- scheduler.cpp
bool step_any(Lock& lock);
void drain(Stream& stream, Lock& lock);
void drain_device(int device, Lock& lock);
void work_until(const std::function<bool()>& done, Lock& lock);

// --- capture.cpp
// Whether a call that CUDA names potentially unsafe is prohibited now; if so, it breaks captures.
bool prohibited(const char* call);
void break_capture(Capture& capture, const std::string& why);
size_t add_node(Stream& stream, Action run);

// --- memory.cpp
const Block* find_block(const void* address);
bool is_pinned(const void* address);

// --- kernels.cpp
// Whether the thread is within an operator whose effect on memory the harness queues.
bool within_operator();
// Notes that the operator used the stream.
void note_stream(cudaStream_t stream);

}  // namespace rehearsal
