// The passes of a tape for every machine.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#if !defined(__clang__)
#pragma GCC optimize("fp-contract=off")
#endif
#define ESPER_LEVEL 0

#include "passes.h"

esper::tape::Runner* esper::tape::make_runner_default(const Network& network, bool is_double) {
    return make_runner(network, is_double);
}
