// The passes of a tape for every machine, and those over double, which tests compare with PyTorch.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#if !defined(__clang__) && !defined(ESPER_ONE_LEVEL)
#pragma GCC optimize("O1", "fp-contract=off")  // compiled in half of the time
#endif
#define ESPER_LEVEL 0

#include "passes.h"

esper::tape::Runner* esper::tape::make_runner_default(const Network& network, bool is_double) {
    if (is_double) return new RunnerOf<double>(network);
    return new RunnerOf<float>(network);
}
