// The arithmetic of stage_batch that the CPU and the CUDA kernel share: the random placement of a sample, and the
// source of each pixel. Plain C++ without torch, callable on both sides. Integers only, so both give the same bits.
#pragma once

#include <cstdint>
#include <cstring>

#include "host_device.h"

namespace esper::stage_batch {

// Four 32-bit numbers.
struct Words {
    uint32_t word[4];
};

// Philox4x32-10, the counter-based generator of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1,
// 2, 3" (SC 2011), section 3.3 and table 2: ten rounds that multiply two words of the counter, mix the halves of the
// products with the key and the other two words, and add a Weyl constant to the key.
ESPER_HOST_DEVICE Words philox(Words counter, uint32_t key0, uint32_t key1) {
    for (int round = 0; round < 10; ++round) {
        const uint64_t product0 = static_cast<uint64_t>(0xD2511F53u) * counter.word[0];
        const uint64_t product1 = static_cast<uint64_t>(0xCD9E8D57u) * counter.word[2];
        counter =
            Words{{static_cast<uint32_t>(product1 >> 32) ^ counter.word[1] ^ key0, static_cast<uint32_t>(product1),
                   static_cast<uint32_t>(product0 >> 32) ^ counter.word[3] ^ key1, static_cast<uint32_t>(product0)}};
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return counter;
}

// Position of the output's window in the image, and whether it is mirrored.
struct Placement {
    int32_t down;   // rows of the image above the window; negative: rows of padding in it
    int32_t right;  // columns, likewise
    bool flip;
};

// The random placement of one sample in one epoch. The counter is (sample, epoch) and the key the seed, 64 bits each,
// low word first, so the draw depends on nothing else. Word 0 gives `down`, word 1 `right`, word 2 the flip.
ESPER_HOST_DEVICE Placement draw(uint64_t seed, uint64_t epoch, uint64_t sample, int32_t padding, bool may_flip) {
    if (padding == 0 && !may_flip) return Placement{0, 0, false};
    const Words words = philox(Words{{static_cast<uint32_t>(sample), static_cast<uint32_t>(sample >> 32),
                                      static_cast<uint32_t>(epoch), static_cast<uint32_t>(epoch >> 32)}},
                               static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
    // Maps a word w to one of n numbers: w * n / 2^32. The probabilities differ by less than n / 2^32.
    const auto choices = static_cast<uint64_t>(2 * padding + 1);
    return Placement{static_cast<int32_t>((words.word[0] * choices) >> 32) - padding,
                     static_cast<int32_t>((words.word[1] * choices) >> 32) - padding,
                     may_flip && (words.word[2] >> 31) != 0};
}

// Column of the image that output column x shows; outside 0..width-1 it shows padding. Cropped first, then mirrored.
ESPER_HOST_DEVICE int32_t source_column(const Placement& placement, int32_t x, int32_t width) {
    return (placement.flip ? width - 1 - x : x) + placement.right;
}

ESPER_HOST_DEVICE int32_t source_row(const Placement& placement, int32_t y) {
    return y + placement.down;
}

ESPER_HOST_DEVICE bool is_inside(int32_t place, int32_t size) {
    return static_cast<uint32_t>(place) < static_cast<uint32_t>(size);
}

// A value of the table in the dtype of the output: float32, or bfloat16 rounded to nearest even; NaN stays NaN.
ESPER_HOST_DEVICE void to_dtype(float value, float& out) {
    out = value;
}
ESPER_HOST_DEVICE void to_dtype(float value, uint16_t& out) {
    uint32_t bits = 0;
    memcpy(&bits, &value, sizeof(bits));
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    out = static_cast<uint16_t>(is_nan ? (bits >> 16) | 0x40u : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace esper::stage_batch
