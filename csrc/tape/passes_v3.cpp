// The passes of a tape for AVX2.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "kernels.h"

#if defined(ESPER_CPU_LEVELS)
// After all headers of the standard library, of which other files must not get code for this instruction set. GCC 12
// defines no macro for a pragma.
#include <immintrin.h>
#define ESPER_LEVEL 3
#pragma GCC target("avx2,fma,bmi,bmi2")
#pragma GCC optimize("fp-contract=off")

#include "passes.h"

esper::tape::Runner* esper::tape::make_runner_v3(const Network& network) {
    return new RunnerOf<float>(network);
}
#endif
