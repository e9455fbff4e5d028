// esper._runtime: threads, streams and graphs. pybind11 without torch headers, so one build works with every torch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <string>

#include "cpus.h"

namespace esper::runtime {

void bind_worker_pool(pybind11::module_& m);   // worker_pool.cpp
void bind_cuda_runtime(pybind11::module_& m);  // cuda_runtime.cpp

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

}  // namespace

}  // namespace esper::runtime

PYBIND11_MODULE(_runtime, m) {
    using namespace esper::runtime;
    m.doc() = "Esper's runtime: hardware report, worker pool, launch loop of CUDA graphs";
    m.def("cpu_features", &cpu_features, "Instruction sets the kernels can use: name -> present on this CPU.");
    m.def("physical_cores", &physical_cores, "Physical cores that this process may run on, at least 1.");
    bind_worker_pool(m);
    bind_cuda_runtime(m);
}
