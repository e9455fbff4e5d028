// esper._runtime: what owns threads and handles rather than tensors. pybind11, no torch headers, so it is independent of
// the torch version.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <string>

#include "cpus.h"
#include "cuda_runtime.h"
#include "graph_loop.h"
#include "worker_pool.h"

namespace py = pybind11;

namespace esper::host {

namespace {

// Instruction sets that kernels may choose at run time, and whether this CPU has them.
std::map<std::string, bool> cpu_features() {
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
    return {
        {"avx2", __builtin_cpu_supports("avx2") != 0},
        {"fma", __builtin_cpu_supports("fma") != 0},
        {"avx512f", __builtin_cpu_supports("avx512f") != 0},
        {"avx512bf16", __builtin_cpu_supports("avx512bf16") != 0},
    };
#else
    return {};
#endif
}

// How this module was compiled.
std::map<std::string, std::string> build_configuration() {
    return {
#if defined(__clang__)
        {"compiler", "clang " __clang_version__},
#elif defined(__GNUC__)
        {"compiler", "gcc " __VERSION__},
#endif
        {"cxx", std::to_string(__cplusplus / 100 % 100)},
        {"pybind11", PYBIND11_TOSTRING(PYBIND11_VERSION_MAJOR) "." PYBIND11_TOSTRING(PYBIND11_VERSION_MINOR)},
    };
}

}  // namespace

}  // namespace esper::host

PYBIND11_MODULE(_runtime, m) {
    using namespace esper::host;
    m.doc() = "Esper's host side: hardware report, worker pool, launch loop of CUDA graphs";
    m.def("cpu_features", &cpu_features, "Instruction sets the kernels can use: name -> present on this CPU.");
    m.def("usable_cpus", &usable_cpus, "CPUs this process may run on.");
    m.def("physical_cores", &physical_cores, "Physical cores among them.");
    m.def("build_configuration", &build_configuration, "Compiler, C++ standard and pybind11 version of this module.");
    bind_worker_pool(m);
    bind_cuda_runtime(m);
    bind_graph_loop(m);
}
