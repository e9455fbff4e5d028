// esper._host: what owns threads and handles rather than tensors. pybind11, no torch headers, so it is independent of
// the torch version. Here: what the machine is, for `esper info` and for placing workers.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <fstream>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <utility>

#if defined(__linux__)
#include <sched.h>
#endif

namespace py = pybind11;

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

// CPUs that this process may run on; fewer than the machine has inside a container.
int usable_cpus() {
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
#endif
    return static_cast<int>(std::thread::hardware_concurrency());
}

#if defined(__linux__)
int topology(int cpu, const char* name) {
    std::ifstream file("/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/" + name);
    int value = -1;
    file >> value;
    return file ? value : -1;
}
#endif

// Physical cores among the usable CPUs: hardware threads that share a core count once. Where the system does not say,
// every usable CPU counts as a core.
int physical_cores() {
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof(set), &set) == 0) {
        std::set<std::pair<int, int>> cores;  // (package, core)
        for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
            if (!CPU_ISSET(cpu, &set)) continue;
            const int core = topology(cpu, "core_id");
            if (core < 0) return CPU_COUNT(&set);
            cores.emplace(topology(cpu, "physical_package_id"), core);
        }
        return static_cast<int>(cores.size());
    }
#endif
    return usable_cpus();
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

PYBIND11_MODULE(_host, m) {
    m.doc() = "Esper's host side: hardware report";
    m.def("cpu_features", &cpu_features, "Instruction sets the kernels can use: name -> present on this CPU.");
    m.def("usable_cpus", &usable_cpus, "CPUs this process may run on.");
    m.def("physical_cores", &physical_cores, "Physical cores among them.");
    m.def("build_configuration", &build_configuration, "Compiler, C++ standard and pybind11 version of this module.");
}
