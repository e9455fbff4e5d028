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

void esper::tape::pass_default(const Pass& pass, bool is_double) {
    pass_on(pass, is_double);
}
