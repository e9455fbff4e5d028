// The CPUs that this process may use, for `esper info` and for placing workers. Plain C++.
#pragma once

#include <vector>

namespace esper::runtime {

// The usable CPUs of each physical core: hardware threads of one core are one row. If the system does not report cores,
// every usable CPU is a row; empty if it does not report usable CPUs.
std::vector<std::vector<int>> cores();

// Number of physical cores that this process may run on, at least 1; fewer than the machine has inside a container.
int physical_cores();

// Pins the calling thread to `cpus`. Returns false, with nothing changed, if that is not possible.
bool pin_to(const std::vector<int>& cpus);

}  // namespace esper::runtime
