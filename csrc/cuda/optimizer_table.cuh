// The tensors that one launch of an optimizer's step works on, by value among the kernel's arguments: there is nothing
// to upload, and a captured graph holds its own copy.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "../optimizer_arguments.h"
#include "chunks.cuh"

namespace esper::optimizer {

// T = count tensors. Values of a group are repeated for each of its tensors.
template <typename OneTensor, int Capacity>
struct Table {
    OneTensor tensor[Capacity];         // [T]
    const void* lr[Capacity];           // [T]
    const void* coefficient[Capacity];  // [T]
    double weight_decay[Capacity];      // [T]
    int32_t first_chunk[Capacity];      // [T]
    bool lr_is_double[Capacity];        // [T]
    bool coefficient_is_double[Capacity];
    int32_t count;
    int32_t chunks;

    ESPER_HOST_DEVICE Number lr_of(int n) const { return Number{lr[n], lr_is_double[n]}; }
    ESPER_HOST_DEVICE Number coefficient_of(int n) const { return Number{coefficient[n], coefficient_is_double[n]}; }
};

// The table of as many `tensors` as fit into it, from number `first`.
template <int Capacity, typename OneTensor>
Table<OneTensor, Capacity> table_of(const Arguments& arguments, const std::vector<OneTensor>& tensors, size_t first) {
    Table<OneTensor, Capacity> table;
    table.count = static_cast<int32_t>(std::min<size_t>(Capacity, tensors.size() - first));
    int64_t chunks = 0;
    for (int32_t i = 0; i < table.count; ++i) {
        const OneTensor& tensor = tensors[first + static_cast<size_t>(i)];
        const Group& group = arguments.groups[static_cast<size_t>(tensor.group)];
        table.tensor[i] = tensor;
        table.lr[i] = group.lr.data;
        table.lr_is_double[i] = group.lr.is_double;
        table.coefficient[i] = group.coefficient.data;
        table.coefficient_is_double[i] = group.coefficient.is_double;
        table.weight_decay[i] = group.weight_decay;
        table.first_chunk[i] = static_cast<int32_t>(chunks);
        chunks += chunk_count(tensor.elements);
        check(chunks < std::numeric_limits<int32_t>::max(), arguments.op, ": too many elements");
    }
    table.chunks = static_cast<int32_t>(chunks);
    return table;
}

}  // namespace esper::optimizer
