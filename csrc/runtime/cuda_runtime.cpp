// The functions of the CUDA runtime that training on GPU streams needs, and the launch loop that calls them: one
// graph a stream, launched once a step, with no Python between steps. The functions are looked up in the library that
// torch loaded: nothing is linked, so this module loads everywhere. Handles are integers, as in
// `torch.cuda.Stream.cuda_stream`.
#include <dlfcn.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#if defined(__linux__)
#include <link.h>
#endif

#include "interpreter.h"

namespace py = pybind11;

namespace esper::runtime {

namespace {

using Handle = std::uintptr_t;  // a cudaStream_t or a cudaGraphExec_t

constexpr int kSuccess = 0;
constexpr int kNotReady = 600;  // cudaErrorNotReady
constexpr unsigned kNonBlocking = 1;
constexpr const char* kNames[] = {"libcudart.so.13", "libcudart.so.12"};

// The path of a loaded library named libcudart*, as in some packages of torch; empty if there is none.
std::string find_loaded() {
    std::string found;
#if defined(__linux__)
    const auto look = [](dl_phdr_info* library, size_t, void* result) {
        const char* const slash = std::strrchr(library->dlpi_name, '/');
        const char* const name = slash != nullptr ? slash + 1 : library->dlpi_name;
        if (std::strncmp(name, "libcudart", 9) != 0) return 0;
        *static_cast<std::string*>(result) = library->dlpi_name;
        return 1;
    };
    dl_iterate_phdr(look, &found);
#endif
    return found;
}

void* open_loaded() {
    for (const char* name : kNames) {
        if (void* library = dlopen(name, RTLD_NOW | RTLD_NOLOAD); library != nullptr) return library;
    }
    const std::string path = find_loaded();
    return path.empty() ? nullptr : dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD);
}

void* open_library(const std::string& path) {
    void* const library = path.empty() ? open_loaded() : dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library != nullptr) return library;
    if (!path.empty()) throw std::runtime_error(std::string("no CUDA runtime can be loaded: ") + dlerror());
    std::string names;
    for (const char* name : kNames) names += std::string(name) + ", ";
    throw std::runtime_error("no CUDA runtime is loaded in this process: looked for " + names +
                             "and any libcudart* among the loaded libraries. A torch built for CUDA loads one when it "
                             "is imported; torch.version.cuda is None for other builds.");
}

void* pointer(Handle handle) {
    return reinterpret_cast<void*>(handle);
}

// Whether the driver has a context on `device`; true if the driver cannot be asked. The runtime does not know, and it
// loads the driver with its first call, so the driver is looked up here and not in the constructor.
bool has_context(void* library, int device) {
    using GetState = int (*)(int device, unsigned* flags, int* active);
    constexpr const char* kName = "cuDevicePrimaryCtxGetState";
    void* symbol = dlsym(library, kName);
    if (symbol == nullptr) {
        void* const driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
        symbol = driver == nullptr ? nullptr : dlsym(driver, kName);
    }
    unsigned flags = 0;
    int active = 1;
    if (symbol == nullptr || reinterpret_cast<GetState>(symbol)(device, &flags, &active) != kSuccess) return true;
    return active != 0;
}

// Signatures of the runtime, without its headers: cudaError_t is an int, handles are pointers.
struct CudaFunctions {
    int (*cudaDriverGetVersion)(int*);
    int (*cudaGetDevice)(int*);
    int (*cudaSetDevice)(int);
    int (*cudaGetLastError)();
    const char* (*cudaGetErrorString)(int);
    int (*cudaStreamCreateWithFlags)(void**, unsigned);
    int (*cudaStreamQuery)(void*);
    int (*cudaGraphLaunch)(void*, void*);
};

class CudaRuntime {
 public:
    // Opens the library at `path`, or the one that this process has loaded, and never closes it. Throws runtime_error
    // that lists the names it looked for.
    explicit CudaRuntime(const std::string& path) {
        library_ = open_library(path);
        std::string missing;
        const auto find = [&](auto& function, const char* name) {
            void* const symbol = dlsym(library_, name);
            if (symbol == nullptr) missing += (missing.empty() ? "" : ", ") + std::string(name);
            function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(symbol);
        };
#define ESPER_FIND(name) find(call_.name, #name)
        ESPER_FIND(cudaDriverGetVersion);
        ESPER_FIND(cudaGetDevice);
        ESPER_FIND(cudaSetDevice);
        ESPER_FIND(cudaGetLastError);
        ESPER_FIND(cudaGetErrorString);
        ESPER_FIND(cudaStreamCreateWithFlags);
        ESPER_FIND(cudaStreamQuery);
        ESPER_FIND(cudaGraphLaunch);
#undef ESPER_FIND
        Dl_info place{};
        if (call_.cudaGetDevice != nullptr && dladdr(reinterpret_cast<void*>(call_.cudaGetDevice), &place) != 0) {
            path_ = place.dli_fname;
        }
        if (!missing.empty()) {
            throw std::runtime_error("the CUDA runtime " + (path.empty() ? path_ : path) + " lacks " + missing +
                                     ", which CUDA 12 and 13 have");
        }
    }
    CudaRuntime(const CudaRuntime&) = delete;
    CudaRuntime& operator=(const CudaRuntime&) = delete;

    const std::string& path() const { return path_; }

    int driver_version() const {
        int version = 0;
        check(call_.cudaDriverGetVersion(&version), "cudaDriverGetVersion");
        return version;
    }

    // Each stream is a new one; torch's pool has 32 and then repeats them. It is never destroyed: torch may hold memory
    // that belongs to it.
    Handle create_stream(int device) const {
        const OnDevice on(*this, device);
        void* stream = nullptr;
        check(call_.cudaStreamCreateWithFlags(&stream, kNonBlocking), "cudaStreamCreateWithFlags");
        return reinterpret_cast<Handle>(stream);
    }

    // Waits until all work on `streams` is done or has failed, or until a second signal handler raises. Polls: the
    // runtime's own wait would keep a core busy and ignore Ctrl-C.
    void wait(const std::vector<Handle>& streams, WithoutGil& without_gil) const {
        using std::chrono::microseconds;
        for (const Handle stream : streams) {
            for (microseconds pause{20}; note(call_.cudaStreamQuery(pointer(stream))) == kNotReady;) {
                if (without_gil.interruptions() > 1) return;
                std::this_thread::sleep_for(pause);
                pause = std::min(2 * pause, microseconds{200});
            }
        }
    }

    // Returns the error code. Also clears the runtime's last error, which torch would find.
    int launch(Handle graph, Handle stream) const {
        return note(call_.cudaGraphLaunch(pointer(graph), pointer(stream)));
    }

    std::string explain(int code) const {
        return std::string(call_.cudaGetErrorString(code)) + " (CUDA error " + std::to_string(code) + ")";
    }

    // Makes `device` current on this thread for the lifetime of the guard. Since CUDA 12 cudaSetDevice makes a context
    // on its device (several hundred megabytes of memory). So it is not called for a device that is current already,
    // and `device` stays current if the previous one has no context; PyTorch's guards do the same.
    class OnDevice {
     public:
        OnDevice(const CudaRuntime& runtime, int device) : runtime_(runtime), device_(device) {
            runtime.check(runtime.call_.cudaGetDevice(&before_), "cudaGetDevice");
            if (before_ != device) runtime.check(runtime.call_.cudaSetDevice(device), "cudaSetDevice");
        }
        ~OnDevice() {
            if (before_ != device_ && has_context(runtime_.library_, before_)) {
                runtime_.note(runtime_.call_.cudaSetDevice(before_));
            }
        }
        OnDevice(const OnDevice&) = delete;
        OnDevice& operator=(const OnDevice&) = delete;

     private:
        const CudaRuntime& runtime_;
        const int device_;
        int before_ = 0;
    };

 private:
    int note(int code) const {
        if (code != kSuccess) call_.cudaGetLastError();
        return code;
    }
    void check(int code, const char* function) const {
        if (note(code) != kSuccess) throw std::runtime_error(std::string(function) + ": " + explain(code));
    }

    void* library_ = nullptr;
    CudaFunctions call_{};
    std::string path_;
};

// A request to stop, which any thread may make.
class StopFlag {
 public:
    void set() { stop_.store(true, std::memory_order_relaxed); }
    void clear() { stop_.store(false, std::memory_order_relaxed); }
    bool is_set() const { return stop_.load(std::memory_order_relaxed); }

 private:
    std::atomic<bool> stop_{false};
};

struct LaunchResult {
    std::vector<std::int64_t> launched;
    std::vector<std::tuple<size_t, std::int64_t, int, std::string>> failures;
    bool stopped = false;
};

// A graph, the stream that it is launched on, and how often.
struct StreamWork {
    Handle graph;
    Handle stream;
    std::int64_t steps;
};

std::vector<StreamWork> zip(const std::vector<Handle>& graphs, const std::vector<Handle>& streams,
                            const std::vector<std::int64_t>& steps) {
    if (graphs.size() != streams.size() || graphs.size() != steps.size()) {
        throw py::value_error("each stream needs a graph and a number of steps; got " + std::to_string(graphs.size()) +
                              " graphs, " + std::to_string(streams.size()) + " streams and " +
                              std::to_string(steps.size()) + " numbers of steps");
    }
    std::vector<StreamWork> work;
    for (size_t i = 0; i < graphs.size(); ++i) {
        const std::string name = "stream " + std::to_string(i);
        if (graphs[i] == 0) throw py::value_error(name + " has no graph: its handle is 0");
        if (steps[i] < 0) throw py::value_error(name + " has " + std::to_string(steps[i]) + " steps");
        work.push_back({graphs[i], streams[i], steps[i]});
    }
    return work;
}

// Launches the graphs on the current device until `stop`, which may be null, is set or a signal handler raises. Throws
// nothing. A stream that fails has no steps left.
LaunchResult launch_in_turn(const CudaRuntime& runtime, std::vector<StreamWork> work, const StopFlag* stop,
                            WithoutGil& without_gil) {
    LaunchResult result;
    result.launched.assign(work.size(), 0);
    while (std::any_of(work.begin(), work.end(), [](const StreamWork& each) { return each.steps > 0; })) {
        result.stopped = (stop != nullptr && stop->is_set()) || without_gil.interruptions() > 0;
        if (result.stopped) break;
        for (size_t i = 0; i < work.size(); ++i) {
            if (work[i].steps == 0) continue;
            const int code = runtime.launch(work[i].graph, work[i].stream);
            if (code == kSuccess) {
                ++result.launched[i];
                --work[i].steps;
            } else {
                result.failures.emplace_back(i, result.launched[i], code, runtime.explain(code));
                work[i].steps = 0;
            }
        }
    }
    return result;
}

LaunchResult launch(const CudaRuntime& runtime, int device, const std::vector<Handle>& graphs,
                    const std::vector<Handle>& streams, const std::vector<std::int64_t>& steps, const StopFlag* stop) {
    const auto work = zip(graphs, streams, steps);
    const CudaRuntime::OnDevice on(runtime, device);
    WithoutGil without_gil;
    const auto result = launch_in_turn(runtime, work, stop, without_gil);
    if (without_gil.interruptions() > 0) runtime.wait(streams, without_gil);
    without_gil.end();
    without_gil.raise();
    return result;
}

}  // namespace

void bind_cuda_runtime(py::module_& m) {
    py::class_<StopFlag>(m, "StopFlag", "A request to stop, which any thread may make.")
        .def(py::init<>())
        .def("set", &StopFlag::set, "Request a stop.")
        .def("clear", &StopFlag::clear, "Withdraw the request.")
        .def_property_readonly("is_set", &StopFlag::is_set, "Whether a stop is requested.");

    py::class_<LaunchResult>(m, "LaunchResult", "Result of CudaRuntime.launch.")
        .def_readonly("launched", &LaunchResult::launched, "Steps launched on each stream.")
        .def_readonly(
            "failures", &LaunchResult::failures,
            "(stream, step, CUDA error code, message) of each stream that failed, the stream by its place in the list.")
        .def_readonly("stopped", &LaunchResult::stopped, "Whether `stop` ended the launches early.");

    py::class_<CudaRuntime>(m, "CudaRuntime", R"(The CUDA runtime that torch loaded, or the library at `path`.

Streams and graphs are integers, as in `Stream.cuda_stream` and `CUDAGraph.raw_cuda_graph_exec()`. Raises RuntimeError
if there is no runtime, and with CUDA's own message if a call fails.)")
        .def(py::init<const std::string&>(), py::arg("path") = "")
        .def_property_readonly("path", &CudaRuntime::path, "The library's file.")
        .def("driver_version", &CudaRuntime::driver_version,
             "The newest CUDA version that the driver supports, 1000 * major + 10 * minor; 0 without a driver.")
        .def("create_stream", &CudaRuntime::create_stream, py::arg("device"),
             "A new stream that does not wait for the default stream. It lives as long as the process.")
        .def("launch", &launch, py::arg("device"), py::arg("graphs"), py::arg("streams"), py::arg("steps"),
             py::arg("stop") = py::none(), R"(Launch graph i on stream i, steps[i] times, without the GIL.

Batch-major: step 0 of all streams, then step 1, so that they share the device. A failed launch ends its own stream
only.
The call does not wait for the device, so launched work may still be running when it returns. `stop` is checked between
steps. Ctrl-C stops the same way and is raised once the streams are idle; a second Ctrl-C does not wait for that.
Raises RuntimeError for a device that does not exist, ValueError for lists of different lengths.)");
}

}  // namespace esper::runtime
