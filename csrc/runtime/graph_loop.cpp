#include "graph_loop.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>

namespace py = pybind11;

namespace esper::host {

namespace {

std::vector<Lane> zip(const std::vector<Handle>& graphs, const std::vector<Handle>& streams,
                      const std::vector<std::int64_t>& steps) {
    if (graphs.size() != streams.size() || graphs.size() != steps.size()) {
        throw py::value_error("a lane has a graph, a stream and a number of steps; there are " +
                              std::to_string(graphs.size()) + " graphs, " + std::to_string(streams.size()) +
                              " streams and " + std::to_string(steps.size()) + " numbers of steps");
    }
    std::vector<Lane> lanes;
    for (size_t i = 0; i < graphs.size(); ++i) {
        const std::string lane = "lane " + std::to_string(i);
        if (graphs[i] == 0) throw py::value_error(lane + " has no graph: its handle is 0");
        if (steps[i] < 0) throw py::value_error(lane + " has " + std::to_string(steps[i]) + " steps");
        lanes.push_back({graphs[i], streams[i], steps[i]});
    }
    return lanes;
}

LaunchResult launch(const CudaRuntime& runtime, int device, const std::vector<Handle>& graphs,
                    const std::vector<Handle>& streams, const std::vector<std::int64_t>& steps, const StopFlag* stop) {
    const auto lanes = zip(graphs, streams, steps);
    const CudaRuntime::OnDevice on(runtime, device);
    Outside outside;
    const auto result = launch_lanes(runtime, lanes, stop, outside);
    if (outside.interruptions() > 0) runtime.wait(streams, outside);
    outside.come_back();
    outside.raise();
    return result;
}

py::list failures(const LaunchResult& result) {
    py::list found;
    for (const auto& failure : result.failures) {
        found.append(py::make_tuple(failure.lane, failure.step, failure.code, failure.text));
    }
    return found;
}

}  // namespace

LaunchResult launch_lanes(const CudaRuntime& runtime, const std::vector<Lane>& lanes, const StopFlag* stop,
                          Outside& outside) {
    const auto begin = std::chrono::steady_clock::now();
    LaunchResult result;
    result.launched.assign(lanes.size(), 0);
    std::vector<std::int64_t> left;  // a lane that failed has none
    for (const Lane& lane : lanes) left.push_back(lane.steps);
    while (std::any_of(left.begin(), left.end(), [](auto steps) { return steps > 0; })) {
        result.stopped = (stop != nullptr && stop->is_set()) || outside.interruptions() > 0;
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

void bind_graph_loop(py::module_& m) {
    py::class_<StopFlag>(m, "StopFlag", "A request to stop that any thread may make.")
        .def(py::init<>())
        .def("set", &StopFlag::set, "Ask to stop.")
        .def("clear", &StopFlag::clear, "Take that back.")
        .def_property_readonly("is_set", &StopFlag::is_set, "Whether somebody asks to stop.");

    py::class_<LaunchResult>(m, "LaunchResult", "What came of CudaRuntime.launch.")
        .def_property_readonly(
            "launched", [](const LaunchResult& result) { return result.launched; }, "Steps launched of each lane.")
        .def_property_readonly("failures", &failures, "(lane, step, CUDA's error code, its text) of lanes that failed.")
        .def_property_readonly(
            "stopped", [](const LaunchResult& result) { return result.stopped; }, "Whether `stop` ended it early.")
        .def_property_readonly(
            "seconds", [](const LaunchResult& result) { return result.seconds; },
            "What launching took, not what the device takes.");

    py::object runtime = m.attr("CudaRuntime");
    py::setattr(runtime, "launch",
                py::cpp_function(&launch, py::name("launch"), py::is_method(runtime), py::arg("device"),
                                 py::arg("graphs"), py::arg("streams"), py::arg("steps"), py::arg("stop") = py::none(),
                                 R"(Launch graph i on stream i, steps[i] times, without the GIL.

Batch-major: step 0 of all lanes, then step 1, so that lanes share the device. A launch that fails ends its lane and no
other. Nothing waits for the device, so what was launched may still be under way; see `wait`. `stop` is looked at between
steps. Ctrl-C stops the same way, and is raised when the streams are idle; the second one does not wait for that.
Raises RuntimeError for a device that there is not, ValueError for lists of different lengths.)"));
}

}  // namespace esper::host
