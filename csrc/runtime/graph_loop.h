// The launch loop of GPU lanes: one graph a lane, launched once a step, with no Python between steps.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda_runtime.h"

namespace esper::runtime {

// A request to stop, which any thread may make.
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
    double seconds = 0;  // duration of the loop, not of the work on the device
};

// Launches every step of every lane on the current device, batch-major: step 0 of all lanes, then step 1, so that lanes
// share the device. An error ends its own lane only. Does not wait for the device and does not throw. Ends early if
// `stop`, which may be null, is set or a signal handler raises.
LaunchResult launch_lanes(const CudaRuntime& runtime, const std::vector<Lane>& lanes, const StopFlag* stop,
                          WithoutGil& without_gil);

}  // namespace esper::runtime
