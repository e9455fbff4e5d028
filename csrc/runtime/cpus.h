// The CPUs that this process may use, for `esper info` and for placing workers. Plain C++.
#pragma once

#include <algorithm>
#include <cstdio>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace esper::runtime {

// A number that Linux reports about the place of a CPU, or -1. No C++ streams: see check() in ../tensors.h.
inline int topology(int cpu, const char* name) {
    const std::string path = "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/" + name;
    std::FILE* file = std::fopen(path.c_str(), "r");
    if (file == nullptr) return -1;
    int value = -1;
    const bool is_number = std::fscanf(file, "%d", &value) == 1;
    std::fclose(file);
    return is_number ? value : -1;
}

// The usable CPUs of each physical core: hardware threads of one core are one row. A CPU whose core the system does not
// report is a row; empty if the system does not report usable CPUs.
inline std::vector<std::vector<int>> cores() {
    std::vector<std::vector<int>> found;
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof(set), &set) != 0) return {};
    std::map<std::pair<int, int>, size_t> places;  // (package, core) -> row
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
        if (!CPU_ISSET(cpu, &set)) continue;
        const int core = topology(cpu, "core_id");
        const int package = core >= 0 ? topology(cpu, "physical_package_id") : -2 - cpu;  // below any package
        const auto [place, is_new] = places.try_emplace({package, core}, found.size());
        if (is_new) found.emplace_back();
        found[place->second].push_back(cpu);
    }
#endif
    return found;
}

// Number of physical cores that this process may run on, at least 1; fewer than the machine has inside a container.
inline int physical_cores() {
    const auto found = static_cast<int>(cores().size());
    return found > 0 ? found : std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

// Pins the calling thread to `cpus`. Returns false, with nothing changed, if that is not possible.
inline bool pin_to([[maybe_unused]] const std::vector<int>& cpus) {
#if defined(__linux__)
    cpu_set_t set;
    CPU_ZERO(&set);
    for (const int cpu : cpus) CPU_SET(cpu, &set);
    return !cpus.empty() && pthread_setaffinity_np(pthread_self(), sizeof(set), &set) == 0;
#else
    return false;
#endif
}

}  // namespace esper::runtime
