// The CPUs that this process may use, for `esper info` and for placing workers. Plain C++.
#pragma once

#include <vector>

namespace esper::host {

// The usable CPUs of each physical core: hardware threads that share a core are one row. Where the system does not say
// which share one, every usable CPU is a core. Empty where it does not say which CPUs are usable.
std::vector<std::vector<int>> cores();

// CPUs that this process may run on; fewer than the machine has inside a container.
int usable_cpus();

// Physical cores among them, at least 1.
int physical_cores();

// Keep the calling thread on `cpus`. False where that is not possible, and then nothing has changed.
bool stay_on(const std::vector<int>& cpus);

}  // namespace esper::host
