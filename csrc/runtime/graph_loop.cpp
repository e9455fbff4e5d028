#include "graph_loop.h"

#include <algorithm>
#include <chrono>

namespace esper::runtime {

LaunchResult launch_lanes(const CudaRuntime& runtime, const std::vector<Lane>& lanes, const StopFlag* stop,
                          WithoutGil& without_gil) {
    const auto begin = std::chrono::steady_clock::now();
    LaunchResult result;
    result.launched.assign(lanes.size(), 0);
    std::vector<std::int64_t> left;  // 0 once a lane has failed
    for (const Lane& lane : lanes) left.push_back(lane.steps);
    while (std::any_of(left.begin(), left.end(), [](auto steps) { return steps > 0; })) {
        result.stopped = (stop != nullptr && stop->is_set()) || without_gil.interruptions() > 0;
        if (result.stopped) break;
        for (size_t i = 0; i < lanes.size(); ++i) {
            if (left[i] == 0) continue;
            const int code = runtime.launch(lanes[i].graph, lanes[i].stream);
            if (code == 0) {
                ++result.launched[i];
                --left[i];
            } else {
                result.failures.push_back({i, result.launched[i], code, runtime.explain(code)});
                left[i] = 0;
            }
        }
    }
    result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    return result;
}

}  // namespace esper::runtime
