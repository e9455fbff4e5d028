// The launch loop of CUDA lanes: one graph a lane, launched once a step, with no Python between steps.
#pragma once

#include <pybind11/pybind11.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda_runtime.h"

namespace esper::host {

// A request to stop that any thread may make.
class StopFlag {
 public:
    void set() { stop_.store(true, std::memory_order_relaxed); }
    void clear() { stop_.store(false, std::memory_order_relaxed); }
    bool is_set() const { return stop_.load(std::memory_order_relaxed); }

 private:
    std::atomic<bool> stop_{false};
};

struct Lane {
    Handle graph;
    Handle stream;
    std::int64_t steps;
};

struct LaneFailure {
    size_t lane;
    std::int64_t step;
    int code;
    std::string text;
};

struct LaunchResult {
    std::vector<std::int64_t> launched;  // steps of each lane
    std::vector<LaneFailure> failures;
    bool stopped = false;
    double seconds = 0;  // in the loop: what launching cost, not what the device took
};

// Every step of every lane on the current device, batch-major: step 0 of all lanes, then step 1, so that lanes share
// the device. An error ends its lane only. Nothing waits for the device, and nothing is thrown. Ends early when `stop`,
// if there is one, is set or a signal handler raised.
LaunchResult launch_lanes(const CudaRuntime& runtime, const std::vector<Lane>& lanes, const StopFlag* stop,
                          Outside& outside);

void bind_graph_loop(pybind11::module_& m);

}  // namespace esper::host
