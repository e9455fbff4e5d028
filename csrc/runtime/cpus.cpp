#include "cpus.h"

#include <algorithm>
#include <fstream>
#include <map>
#include <string>
#include <thread>
#include <utility>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace esper::runtime {

#if defined(__linux__)

namespace {

int topology(int cpu, const char* name) {
    std::ifstream file("/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/" + name);
    int value = -1;
    file >> value;
    return file ? value : -1;
}

std::vector<int> usable() {
    std::vector<int> found;
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof(set), &set) != 0) return found;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
        if (CPU_ISSET(cpu, &set)) found.push_back(cpu);
    }
    return found;
}

}  // namespace

std::vector<std::vector<int>> cores() {
    std::vector<std::vector<int>> single, found;
    std::map<std::pair<int, int>, size_t> places;  // (package, core) -> row
    bool known = true;
    for (const int cpu : usable()) {
        const int core = topology(cpu, "core_id");
        known = known && core >= 0;
        const auto [place, is_new] = places.try_emplace({topology(cpu, "physical_package_id"), core}, found.size());
        if (is_new) found.emplace_back();
        found[place->second].push_back(cpu);
        single.push_back({cpu});
    }
    return known ? found : single;
}

bool pin_to(const std::vector<int>& cpus) {
    cpu_set_t set;
    CPU_ZERO(&set);
    for (const int cpu : cpus) CPU_SET(cpu, &set);
    return !cpus.empty() && pthread_setaffinity_np(pthread_self(), sizeof(set), &set) == 0;
}

#else

std::vector<std::vector<int>> cores() {
    return {};
}

bool pin_to(const std::vector<int>&) {
    return false;
}

#endif

int physical_cores() {
    const auto found = static_cast<int>(cores().size());
    return found > 0 ? found : std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

}  // namespace esper::runtime
