// Instruction sets chosen at run time, so that one build is fast on every x86-64 machine and runs on all of them.
//
// A function marked ESPER_CLONES is compiled three times, and the loader picks one for the machine it is on. What it
// calls must be marked ESPER_INLINE, to be compiled as part of each copy. Elsewhere both markers mean nothing special.
#pragma once

#define ESPER_INLINE inline __attribute__((always_inline))

#if defined(__x86_64__) && defined(__gnu_linux__)
#define ESPER_CPU_CLONES 1
#if !defined(__clang__) && __GNUC__ >= 12
// Levels of the architecture: AVX-512 with all its 256-bit forms, and AVX2 with fused multiply-add.
#define ESPER_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define ESPER_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#endif
#else
#define ESPER_CLONES
#endif
