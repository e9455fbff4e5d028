#include "cuda_runtime.h"

#include <dlfcn.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <thread>

#if defined(__linux__)
#include <link.h>
#endif

namespace py = pybind11;

namespace esper::host {

namespace {

constexpr int kSuccess = 0;
constexpr int kNotReady = 600;  // cudaErrorNotReady
constexpr unsigned kNonBlocking = 1;
constexpr unsigned kDisableTiming = 2;
constexpr const char* kNames[] = {"libcudart.so.13", "libcudart.so.12"};

// The path of a loaded library that is called libcudart-something, as some packages of torch do; empty if there is
// none.
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
                             "and any libcudart* among the loaded libraries. A torch that was built for CUDA loads one "
                             "when it is imported; torch.version.cuda says whether this one was.");
}

void* pointer(Handle handle) {
    return reinterpret_cast<void*>(handle);
}

// `handle`, which is not among the `ours` any more.
void* take_out(std::set<Handle>& ours, Handle handle, const char* what) {
    if (ours.erase(handle) == 0) {
        throw py::value_error(std::string(what) + " " + std::to_string(handle) +
                              " was not created here, or is destroyed");
    }
    return pointer(handle);
}

}  // namespace

CudaRuntime::CudaRuntime(const std::string& path) {
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
    ESPER_FIND(cudaStreamDestroy);
    ESPER_FIND(cudaStreamQuery);
    ESPER_FIND(cudaStreamWaitEvent);
    ESPER_FIND(cudaEventCreateWithFlags);
    ESPER_FIND(cudaEventRecord);
    ESPER_FIND(cudaEventDestroy);
    ESPER_FIND(cudaGraphLaunch);
#undef ESPER_FIND
    Dl_info place{};
    if (call_.cudaGetDevice != nullptr && dladdr(reinterpret_cast<void*>(call_.cudaGetDevice), &place) != 0) {
        path_ = place.dli_fname;
    }
    if (!missing.empty()) {
        throw std::runtime_error("the CUDA runtime " + (path.empty() ? path_ : path) + " lacks " + missing +
                                 ", which those of CUDA 12 and 13 have");
    }
}

int CudaRuntime::note(int code) const {
    if (code != kSuccess) call_.cudaGetLastError();
    return code;
}

std::string CudaRuntime::explain(int code) const {
    return std::string(call_.cudaGetErrorString(code)) + " (CUDA error " + std::to_string(code) + ")";
}

void CudaRuntime::check(int code, const char* function) const {
    if (note(code) != kSuccess) throw std::runtime_error(std::string(function) + ": " + explain(code));
}

// Whether the driver has a context on `device`; also true if there is no driver to ask. The runtime cannot tell, and it
// loads the driver with its first call, so the driver is looked up here and not in the constructor.
bool CudaRuntime::has_context(int device) const {
    using GetState = int (*)(int device, unsigned* flags, int* active);
    constexpr const char* kName = "cuDevicePrimaryCtxGetState";
    void* symbol = dlsym(library_, kName);
    if (symbol == nullptr) {
        void* const driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
        symbol = driver == nullptr ? nullptr : dlsym(driver, kName);
    }
    unsigned flags = 0;
    int active = 1;
    if (symbol == nullptr || reinterpret_cast<GetState>(symbol)(device, &flags, &active) != kSuccess) return true;
    return active != 0;
}

CudaRuntime::OnDevice::OnDevice(const CudaRuntime& runtime, int device) : runtime_(runtime), device_(device) {
    runtime.check(runtime.call_.cudaGetDevice(&before_), "cudaGetDevice");
    if (before_ != device) runtime.check(runtime.call_.cudaSetDevice(device), "cudaSetDevice");
}

CudaRuntime::OnDevice::~OnDevice() {
    if (before_ != device_ && runtime_.has_context(before_)) runtime_.note(runtime_.call_.cudaSetDevice(before_));
}

int CudaRuntime::driver_version() const {
    int version = 0;
    check(call_.cudaDriverGetVersion(&version), "cudaDriverGetVersion");
    return version;
}

Handle CudaRuntime::create_stream(int device) {
    const OnDevice on(*this, device);
    void* stream = nullptr;
    check(call_.cudaStreamCreateWithFlags(&stream, kNonBlocking), "cudaStreamCreateWithFlags");
    return *streams_.insert(reinterpret_cast<Handle>(stream)).first;
}

void CudaRuntime::destroy_stream(Handle stream) {
    check(call_.cudaStreamDestroy(take_out(streams_, stream, "stream")), "cudaStreamDestroy");
}

Handle CudaRuntime::create_event(int device) {
    const OnDevice on(*this, device);
    void* event = nullptr;
    check(call_.cudaEventCreateWithFlags(&event, kDisableTiming), "cudaEventCreateWithFlags");
    return *events_.insert(reinterpret_cast<Handle>(event)).first;
}

void CudaRuntime::destroy_event(Handle event) {
    check(call_.cudaEventDestroy(take_out(events_, event, "event")), "cudaEventDestroy");
}

void CudaRuntime::record_event(Handle event, Handle stream) const {
    check(call_.cudaEventRecord(pointer(event), pointer(stream)), "cudaEventRecord");
}

void CudaRuntime::wait_event(Handle stream, Handle event) const {
    check(call_.cudaStreamWaitEvent(pointer(stream), pointer(event), 0), "cudaStreamWaitEvent");
}

bool CudaRuntime::idle(Handle stream) const {
    const int code = note(call_.cudaStreamQuery(pointer(stream)));
    if (code != kNotReady) check(code, "cudaStreamQuery");
    return code == kSuccess;
}

// By looking now and then: the runtime's own wait would keep a core busy, and would not hear of Ctrl-C.
std::string CudaRuntime::wait(const std::vector<Handle>& streams, Outside& outside) const {
    using std::chrono::microseconds;
    std::string error;
    for (size_t i = 0; i < streams.size(); ++i) {
        int code = kNotReady;
        for (microseconds pause{20}; (code = note(call_.cudaStreamQuery(pointer(streams[i])))) == kNotReady;) {
            if (outside.interruptions() > 1) return error;
            std::this_thread::sleep_for(pause);
            pause = std::min(2 * pause, microseconds{200});
        }
        if (code != kSuccess && error.empty()) {
            error = "stream " + std::to_string(i) + " of " + std::to_string(streams.size()) + ": " + explain(code);
        }
    }
    return error;
}

int CudaRuntime::launch(Handle graph, Handle stream) const {
    return note(call_.cudaGraphLaunch(pointer(graph), pointer(stream)));
}

void bind_cuda_runtime(py::module_& m) {
    const auto wait = [](const CudaRuntime& runtime, const std::vector<Handle>& streams) {
        Outside outside;
        const std::string error = runtime.wait(streams, outside);
        outside.come_back();
        outside.raise();
        if (!error.empty()) throw std::runtime_error(error);
    };
    py::class_<CudaRuntime>(m, "CudaRuntime", R"(The CUDA runtime that torch loaded, or the library at `path`.

Streams, events and graphs are the integers that torch gives for them too: `Stream.cuda_stream`, `Event.cuda_event`,
`CUDAGraph.raw_cuda_graph_exec()`. Raises RuntimeError where there is no runtime, and with CUDA's own words for an error
of a call.)")
        .def(py::init<const std::string&>(), py::arg("path") = "")
        .def_property_readonly("path", &CudaRuntime::path, "The library's file.")
        .def("driver_version", &CudaRuntime::driver_version,
             "The newest CUDA version that the driver serves, 1000 * major + 10 * minor; 0 without a driver.")
        .def("create_stream", &CudaRuntime::create_stream, py::arg("device"),
             "A new stream that does not wait for the default stream. It lives until it is destroyed.")
        .def("destroy_stream", &CudaRuntime::destroy_stream, py::arg("stream"), "End a stream that was created here.")
        .def("create_event", &CudaRuntime::create_event, py::arg("device"), "A new event without times.")
        .def("destroy_event", &CudaRuntime::destroy_event, py::arg("event"), "End an event that was created here.")
        .def("record_event", &CudaRuntime::record_event, py::arg("event"), py::arg("stream"),
             "The event happens when what is on the stream now is done.")
        .def("wait_event", &CudaRuntime::wait_event, py::arg("stream"), py::arg("event"),
             "What comes later on the stream comes after the event.")
        .def("idle", &CudaRuntime::idle, py::arg("stream"), "Whether all that was put on the stream is done.")
        .def("wait", wait, py::arg("streams"), R"(Wait until all that was put on the streams is done, without the GIL.

Raises RuntimeError with the first error, after the other streams are done. Ctrl-C is raised after the wait; the second
one ends it.)");
}

}  // namespace esper::host
