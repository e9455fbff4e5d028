// Work that is split among torch's threads if there is enough of it.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>

namespace esper {

// Runs body(begin, end) over the parts 0 to `parts`, which have `elements` elements together.
template <typename Body>
void for_parts(int64_t parts, int64_t elements, const Body& body) {
    constexpr int64_t kParallelElements = 256 * 1024;  // below this, waking threads costs more than it saves
    constexpr int64_t kElementsPerTask = 64 * 1024;
    if (elements < kParallelElements || torch::stable::get_num_threads() <= 1) return body(0, parts);
    torch::stable::parallel_for(0, parts, std::max<int64_t>(1, kElementsPerTask * parts / elements), body);
}

}  // namespace esper
