// Gradient statistics on CUDA.
//
// Policy: one launch for up to kLargeCapacity tensors. The table of pointers travels by value among the kernel's
// arguments, so there is nothing to upload and nothing to keep alive, and a captured graph holds its own copy. A block
// sums one chunk of 8192 elements with 16-byte loads (ends that are not aligned are peeled) and writes one row of
// scratch memory. The block that finishes last adds the rows in a fixed order, so results are the same bits every time,
// and sets the counter back to zero, so that the graph can be replayed. More tensors take more launches, one table
// each; the last one closes the groups.
#include <torch/csrc/stable/library.h>

#include <limits>

#include "../grad_stats_arguments.h"
#include "chunks.cuh"
#include "elements.cuh"
#include "reduce.cuh"
#include "stream.h"

namespace esper::grad_stats {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kUnroll = 4;            // 16-byte loads in flight per thread
constexpr int kScratchColumns = 6;    // doubles in a Row; _SCRATCH_COLUMNS there
constexpr int kSmallCapacity = 128;   // fits the 4 KB of arguments that every launch has
constexpr int kLargeCapacity = 1024;  // fits the 32 KB of CUDA 12.1 and later

// One row of scratch [1 + N + C, kScratchColumns]: row 0 holds the counter, then a row a tensor, then a row a chunk.
struct Row {
    Totals totals;
    double group;  // index of the tensor's group; unused in chunk rows
};
static_assert(sizeof(Row) == kScratchColumns * sizeof(double));

// Gradients of one launch, T = count.
template <int Capacity>
struct Table {
    const void* data[Capacity];         // [T]
    int64_t elements[Capacity];         // [T]
    int32_t first_chunk[Capacity + 1];  // [T + 1]
    int32_t group[Capacity];            // [T] ascending
    Dtype dtype[Capacity];              // [T]
    int32_t count;
};

struct Launch {
    unsigned int* counter;
    Row* tensor_rows;      // [N]
    Row* chunk_rows;       // [C] of this launch
    double* fields;        // [G, kFieldCount]
    double* norms;         // [N]
    int64_t first_tensor;  // where this table starts among all N
    int64_t tensors;       // N
    int64_t groups;        // G
    double max_norm;
    double exploding_norm;
    bool closes_groups;
};
static_assert(sizeof(Table<kSmallCapacity>) + sizeof(Launch) <= 4096);
static_assert(sizeof(Table<kLargeCapacity>) + sizeof(Launch) <= 32764);

// --- reading elements ---------------------------------------------------------------------------------------------

// Adds K elements: as a float32 sum if that can be trusted, otherwise and for float64 element by element.
template <typename Type, int K>
__device__ void add_values(Totals& totals, const typename Type::Storage (&x)[K]) {
    float sum = 0;
    int zeros = 0;
#pragma unroll
    for (int k = 0; k < K; ++k) {
        const typename Type::Real value = Type::value(x[k]);
        if constexpr (sizeof(value) == sizeof(float)) sum += value * value;
        zeros += value == 0;
    }
    totals.zero += zeros;
    if (sum >= kTrustedMin && sum <= kTrustedMax) {
        totals.sum_sq += sum;
    } else if (zeros != K) {
#pragma unroll
        for (int k = 0; k < K; ++k) add_element(totals, Type::value(x[k]));
    }
}

// Totals of this thread's share of n elements at x; n <= kChunk.
template <typename Type>
__device__ Totals thread_totals(const typename Type::Storage* x, int n) {
    using Storage = typename Type::Storage;
    constexpr int kVector = 16 / sizeof(Storage);
    Totals totals{0, 0, 0, 0, 0};

    const int past_boundary = static_cast<int>((reinterpret_cast<uintptr_t>(x) & 15) / sizeof(Storage));
    const int head = min(n, (kVector - past_boundary) % kVector);  // elements before the first 16-byte boundary
    const int vectors = (n - head) / kVector;
    const int tail = head + vectors * kVector;  // index of the first element after the last whole vector
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < head) add_values<Type, 1>(totals, {x[thread]});
    if (thread < n - tail) add_values<Type, 1>(totals, {x[tail + thread]});

    const uint4* body = reinterpret_cast<const uint4*>(x + head);
    for (int start = thread; start < vectors; start += kThreads * kUnroll) {
        uint4 raw[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            const int v = start + u * kThreads;
            if (v < vectors) raw[u] = __ldg(body + v);
        }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            if (start + u * kThreads < vectors) {
                Storage parts[kVector];
                memcpy(parts, &raw[u], sizeof(parts));
                add_values<Type, kVector>(totals, parts);
            }
        }
    }
    return totals;
}

// --- reducing in a fixed order --------------------------------------------------------------------------------------

// Index of the first tensor row whose group is not below `group`.
__device__ int64_t first_of_group(const Row* rows, int64_t count, double group) {
    int64_t low = 0, high = count;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (__ldcg(&rows[middle].group) < group) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

// --- kernel ---------------------------------------------------------------------------------------------------------

template <int Capacity>
__global__ void __launch_bounds__(kThreads)
    grad_stats_kernel(const __grid_constant__ Table<Capacity> table, const __grid_constant__ Launch launch) {
    const int chunk = static_cast<int>(blockIdx.x);
    if (chunk < table.first_chunk[table.count]) {
        const int n = tensor_of_chunk(table.first_chunk, table.count, chunk);
        const int64_t start = (chunk - table.first_chunk[n]) * kChunk;
        const int64_t left = table.elements[n] - start;
        const int size = static_cast<int>(left < kChunk ? left : kChunk);
        const auto share = [&](auto type) {
            return thread_totals<decltype(type)>(
                static_cast<const typename decltype(type)::Storage*>(table.data[n]) + start, size);
        };
        const Totals mine = table.dtype[n] == Dtype::kFloat32    ? share(Float32{})
                            : table.dtype[n] == Dtype::kBFloat16 ? share(BFloat16{})
                            : table.dtype[n] == Dtype::kFloat16  ? share(Float16{})
                                                                 : share(Float64{});
        const Totals total = block_sum<kThreads>(mine);
        if (threadIdx.x == 0) launch.chunk_rows[chunk].totals = total;
    }
    if (!is_last_block(launch.counter)) return;

    // Chunks to tensors: a warp a tensor, its lanes over the chunks.
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    for (int n = warp; n < table.count; n += kWarps) {
        Totals mine{0, 0, 0, 0, 0};
        for (int c = table.first_chunk[n] + lane; c < table.first_chunk[n + 1]; c += 32) {
            add(mine, fresh(launch.chunk_rows + c).totals);
        }
        Totals total = warp_sum(mine);
        if (lane == 0) {
            total.elements = static_cast<double>(table.elements[n]);
            launch.tensor_rows[launch.first_tensor + n] = Row{total, static_cast<double>(table.group[n])};
            launch.norms[launch.first_tensor + n] = sqrt(total.sum_sq);
        }
    }
    if (!launch.closes_groups) return;
    __syncthreads();

    // Tensors to groups: a warp a group, its lanes over the tensors.
    for (int64_t g = warp; g < launch.groups; g += kWarps) {
        const int64_t begin = first_of_group(launch.tensor_rows, launch.tensors, static_cast<double>(g));
        const int64_t end = first_of_group(launch.tensor_rows, launch.tensors, static_cast<double>(g + 1));
        GroupTotals group = empty_group();
        for (int64_t n = begin + lane; n < end; n += 32) {
            add_tensor(group, fresh(launch.tensor_rows + n).totals, launch.exploding_norm);
        }
        for (int offset = 16; offset > 0; offset /= 2) merge(group, shfl_down(group, offset));
        if (lane == 0) write_fields(group, launch.max_norm, launch.fields + g * kFieldCount);
    }
}

// --- launchers ------------------------------------------------------------------------------------------------------

// Rows of scratch that a call needs, R; the same sum is in esper/ops/grad_stats.py.
int64_t scratch_rows(const Arguments& arguments) {
    int64_t rows = 1 + static_cast<int64_t>(arguments.gradients.size());
    for (const Gradient& gradient : arguments.gradients) rows += chunk_count(gradient.elements);
    return rows;
}

template <int Capacity>
void launch_all(const Arguments& arguments, Launch launch, cudaStream_t stream) {
    std::vector<int32_t> group_of;  // [N]
    group_of.reserve(arguments.gradients.size());
    for (size_t g = 0; g < arguments.group_sizes.size(); ++g) {
        group_of.insert(group_of.end(), static_cast<size_t>(arguments.group_sizes[g]), static_cast<int32_t>(g));
    }
    do {  // once even without tensors: groups without gradients have statistics too
        Table<Capacity> table;
        table.count = static_cast<int32_t>(std::min<int64_t>(Capacity, launch.tensors - launch.first_tensor));
        int64_t chunks = 0;
        for (int32_t i = 0; i < table.count; ++i) {
            const auto n = static_cast<size_t>(launch.first_tensor + i);
            const Gradient& gradient = arguments.gradients[n];
            table.data[i] = gradient.data;
            table.elements[i] = gradient.elements;
            table.first_chunk[i] = static_cast<int32_t>(chunks);
            table.group[i] = group_of[n];
            table.dtype[i] = gradient.dtype;
            chunks += chunk_count(gradient.elements);
            check(chunks < std::numeric_limits<int32_t>::max(), "grad_stats: too many elements");
        }
        table.first_chunk[table.count] = static_cast<int32_t>(chunks);
        launch.closes_groups = launch.first_tensor + table.count == launch.tensors;
        const auto blocks = static_cast<unsigned int>(std::max<int64_t>(1, chunks));
        grad_stats_kernel<Capacity><<<blocks, kThreads, 0, stream>>>(table, launch);
        STD_CUDA_KERNEL_LAUNCH_CHECK();
        launch.first_tensor += table.count;
    } while (launch.first_tensor < launch.tensors);
}

void compute(const Arguments& arguments, double* fields, double* norms, double* scratch, cudaStream_t stream) {
    if (arguments.group_sizes.empty()) return;
    Launch launch{};
    launch.tensors = static_cast<int64_t>(arguments.gradients.size());
    launch.groups = static_cast<int64_t>(arguments.group_sizes.size());
    launch.counter = reinterpret_cast<unsigned int*>(scratch);
    launch.tensor_rows = reinterpret_cast<Row*>(scratch) + 1;
    launch.chunk_rows = launch.tensor_rows + launch.tensors;
    launch.fields = fields;
    launch.norms = norms;
    launch.max_norm = arguments.max_norm;
    launch.exploding_norm = arguments.exploding_norm;
    if (launch.tensors <= kSmallCapacity) {
        launch_all<kSmallCapacity>(arguments, launch, stream);
    } else {
        launch_all<kLargeCapacity>(arguments, launch, stream);
    }
}

void grad_stats(StableIValue* stack, uint64_t, uint64_t) {
    const Arguments arguments = read_arguments(stack, nullptr);
    const Device device = arguments.device;
    const DeviceStream stream(device);
    auto [fields, norms] = new_outputs(arguments);
    const OwnedTensor scratch = empty_float64(device, {scratch_rows(arguments), kScratchColumns});
    double* scratch_data = checked_float64(scratch.get(), "scratch", device);
    STD_CUDA_CHECK(cudaMemsetAsync(scratch_data, 0, sizeof(double), stream));  // the counter
    compute(arguments, checked_float64(fields.get(), "fields", device), checked_float64(norms.get(), "norms", device),
            scratch_data, stream);
    stack[0] = give_tensor(std::move(fields));
    stack[1] = give_tensor(std::move(norms));
}

void grad_stats_out(StableIValue* stack, uint64_t, uint64_t) {
    const Outputs outputs = take_outputs(stack);
    const Arguments arguments = read_arguments(stack, outputs.fields.get());
    const Device device = arguments.device;
    check_output_sizes(arguments, outputs);
    check(numel_of(outputs.scratch.get()) >= scratch_rows(arguments) * kScratchColumns,
          "grad_stats: out= was made for smaller gradients; make a new one by a call without out=");
    const DeviceStream stream(device);
    compute(arguments, checked_float64(outputs.fields.get(), "fields", device),
            checked_float64(outputs.norms.get(), "norms", device),
            checked_float64(outputs.scratch.get(), "scratch", device), stream);
}

}  // namespace
}  // namespace esper::grad_stats

STABLE_TORCH_LIBRARY_IMPL(esper, CUDA, m) {
    m.impl("grad_stats", &esper::grad_stats::grad_stats);
    m.impl("grad_stats.out", &esper::grad_stats::grad_stats_out);
}
