// A whole pass over a tape: which layer runs when, and how samples come in and out.
#pragma once

#include "attention.h"
#include "batch_norm.h"
#include "convolution.h"
#include "elementwise.h"
#include "embedding.h"
#include "group_norm.h"
#include "kernels.h"
#include "linear.h"
#include "norm_pool.h"
#include "pool.h"
#include "product.h"
#include "running_mean.h"
#include "seed.h"

// Under the address sanitizer values lie apart, and whoever reads or writes between them is reported; what no layer has
// written is NaN.
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#define ESPER_APART 64
#else
#define ESPER_APART 0
#define ASAN_POISON_MEMORY_REGION(address, bytes)
#define ASAN_UNPOISON_MEMORY_REGION(address, bytes)
#endif

namespace esper::tape {
namespace {

constexpr int64_t kApart = ESPER_APART;  // numbers between two values

template <typename Real>
void run_forward(Machine<Real>& machine, size_t first, size_t last) {
    for (size_t n = first; n < last; ++n) {
        const Instruction& i = machine.code[n];
        if (machine.value(i.output).skipped) {
            norm_pool_forward(machine, i, machine.code[++n]);
            continue;
        }
        switch (i.layer) {
            case kConvolution:
                convolution_forward(machine, i);
                break;
            case kBatchNorm:
                batch_norm_forward(machine, i);
                break;
            case kGroupNorm:
                group_norm_forward(machine, i);
                break;
            case kActivation:
                activation_forward(machine, i);
                break;
            case kMaxPool:
                max_pool_forward(machine, i);
                break;
            case kAveragePool:
                average_pool_forward(machine, i);
                break;
            case kFlatten:
                flatten_forward(machine, i);
                break;
            case kScale:
                scale_forward(machine, i);
                break;
            case kMultiply:
                multiply_forward(machine, i);
                break;
            case kAdd:
                add_forward(machine, i);
                break;
            case kDetach:
                detach_forward(machine, i);
                break;
            case kGuard:
                guard_forward(machine, i);
                break;
            case kLinear:
                linear_forward(machine, i);
                break;
            case kEmbedding:
                embedding_forward(machine, i);
                break;
            case kAttention:
                Attention<Real>(machine, i).forward();
                break;
            case kRunningMean:
                running_mean_forward(machine, i);
                break;
            default:
                pass_through_forward(machine, i);
                break;
        }
    }
}

template <typename Real>
void run_backward(Machine<Real>& machine, size_t first, size_t last) {
    for (size_t n = last; n-- > first;) {
        const Instruction& i = machine.code[n];
        if (!machine.value(i.output).gathered) continue;  // nothing that is wanted depends on it
        if (machine.value(i.input).skipped) {
            norm_pool_backward(machine, machine.code[--n], i);
            continue;
        }
        switch (i.layer) {
            case kConvolution:
                convolution_backward(machine, i);
                break;
            case kBatchNorm:
                batch_norm_backward(machine, i);
                break;
            case kGroupNorm:
                group_norm_backward(machine, i);
                break;
            case kActivation:
                activation_backward(machine, i);
                break;
            case kMaxPool:
                max_pool_backward(machine, i);
                break;
            case kAveragePool:
                average_pool_backward(machine, i);
                break;
            case kFlatten:
                flatten_backward(machine, i);
                break;
            case kScale:
                scale_backward(machine, i);
                break;
            case kMultiply:
                multiply_backward(machine, i);
                break;
            case kAdd:
                add_backward(machine, i);
                break;
            case kDetach:
                break;
            case kGuard:
                guard_backward(machine, i);
                break;
            case kLinear:
                linear_backward(machine, i);
                break;
            case kEmbedding:
                embedding_backward(machine, i);
                break;
            case kAttention:
                Attention<Real>(machine, i).backward();
                break;
            case kRunningMean:
                running_mean_backward(machine, i);
                break;
            default:
                pass_through_backward(machine, i);
                break;
        }
    }
}

// Finds which gradients are wanted, and which values need no memory.
template <typename Real>
void prepare(Machine<Real>& machine, const Network& network) {
    machine.saved.resize(machine.code.size());
    machine.values[0].needed = network.input_gradient;
    std::vector<int64_t> readers(machine.values.size());
    for (const Instruction& i : machine.code) {
        const Value<Real>& in = machine.value(i.input);
        Value<Real>& out = machine.value(i.output);
        readers[static_cast<size_t>(i.input)] += 1;
        if (i.other >= 0) readers[static_cast<size_t>(i.other)] += 1;
        if (!network.backward || i.layer == kDetach) continue;
        out.needed = in.needed || (i.other >= 0 && machine.value(i.other).needed);
        const bool pair = i.layer <= kGroupNorm || i.layer == kLinear || i.layer == kEmbedding;
        const int64_t parameters = i.layer == kScale ? 1 : pair ? 2 : 0;
        for (int64_t p = 0; p < parameters; ++p) {
            if (i.number[p] >= 0 && machine.gradient(i.number[p]) != nullptr) out.needed = true;
        }
    }
    for (size_t n = 0; n + 1 < machine.code.size(); ++n) {
        const int64_t between = machine.code[n].output;
        if (readers[static_cast<size_t>(between)] == 1 && pools_norm(machine.code[n], machine.code[n + 1])) {
            machine.value(between).skipped = true;
        }
    }
}

// Where the numbers of a sample that lie in one piece go in a group: by their place in the sample. Empty if they do
// not.
template <typename Real>
std::vector<int64_t> places_of_sample(const Value<Real>& value, const int64_t* strides) {
    std::vector<int64_t> places(static_cast<size_t>(value.channels * value.positions()), -1);
    for (int64_t c = 0; c < value.channels; ++c) {
        for (int64_t y = 0; y < value.height; ++y) {
            for (int64_t x = 0; x < value.width; ++x) {
                const int64_t at = c * strides[1] + y * strides[2] + x * strides[3];
                if (at < 0 || at >= static_cast<int64_t>(places.size())) return {};
                if (places[static_cast<size_t>(at)] >= 0) return {};
                places[static_cast<size_t>(at)] = value.at(0, c) + y * value.row() + x * kLanes;
            }
        }
    }
    return places;
}

// Reads 16 samples; `places` as above.
template <typename Real>
void read_group(const Real* const* sample, const std::vector<int64_t>& places, Real* lanes) {
    const size_t together = kWidth<Real>;
    size_t n = 0;
    for (; n + together <= places.size(); n += together) {
        for (int l = 0; l < kLanes; l += kWidth<Real>) {
            transpose_square<Real>([&](int row) __attribute__((always_inline)) { return sample[l + row] + n; },
                                   [&](int row) __attribute__((always_inline)) {
                                       return lanes + places[n + static_cast<size_t>(row)] + l;
                                   });
        }
    }
    for (; n < places.size(); ++n) {
        for (int l = 0; l < kLanes; ++l) lanes[places[n] + l] = sample[l][n];
    }
}

// Between samples in memory and the lanes of a value; lanes without a sample become zero. `places` are those of samples
// that are read.
template <typename Real, bool kIn>
void move_samples(const Machine<Real>& machine, const Value<Real>& value, Real* lanes, Real* samples,
                  const int64_t* rows, const int64_t* strides, const std::vector<int64_t>& places = {}) {
    for (int64_t g = 0; g < machine.groups; ++g) {
        const int64_t count = machine.count(g);
        Real* sample[kLanes];
        for (int64_t l = 0; l < count; ++l) {
            const int64_t n = g * kLanes + l;
            sample[l] = samples + (rows == nullptr ? n : rows[n]) * strides[0];
        }
        if (kIn && count == kLanes && !places.empty()) {
            read_group<Real>(sample, places, lanes + value.at(g, 0));
            continue;
        }
        for (int64_t c = 0; c < value.channels; ++c) {
            Real* position = lanes + value.at(g, c);
            for (int64_t y = 0; y < value.height; ++y) {
                for (int64_t x = 0; x < value.width; ++x, position += kLanes) {
                    const int64_t at = c * strides[1] + y * strides[2] + x * strides[3];
                    if constexpr (kIn) {
                        for (int64_t l = 0; l < count; ++l) position[l] = sample[l][at];
                        for (int64_t l = count; l < kLanes; ++l) position[l] = 0;
                    } else {
                        for (int64_t l = 0; l < count; ++l) sample[l][at] = position[l];
                    }
                }
            }
        }
    }
}

template <typename Real, bool kIn>
void move_batch(const Machine<Real>& machine, const Value<Real>& value, Real* lanes, Real* samples) {
    const int64_t strides[4] = {value.channels * value.positions(), value.positions(), value.width, 1};
    move_samples<Real, kIn>(machine, value, lanes, samples, nullptr, strides);
}

template <typename Real>
class RunnerOf final : public Runner {
 public:
    explicit RunnerOf(const Network& network) : ends_(network.ends, network.ends + network.sections) {
        machine_.code.assign(network.code, network.code + ends_.back());
        machine_.tensors.assign(network.tensors, network.tensors + network.tensor_count);
        machine_.training = network.training;
        for (int64_t v = 0; v < network.value_count; ++v) {
            Value<Real> value;
            value.channels = network.shapes[3 * v];
            value.height = network.shapes[3 * v + 1];
            value.width = network.shapes[3 * v + 2];
            machine_.values.push_back(value);
        }
        count(network.samples);
        prepare(machine_, network);
        lay_out();
        if (!network.backward) return;
        for (const Tensor& tensor : machine_.tensors) {
            if (tensor.gradient != nullptr) std::fill_n(static_cast<Real*>(tensor.gradient), tensor.elements, Real{});
        }
    }

    void load(const Samples& samples, int64_t count_of_batch) override {
        count(count_of_batch);
        const Value<Real>& in = machine_.values.front();
        auto* data = const_cast<Real*>(static_cast<const Real*>(samples.data));
        if (!std::equal(strides_, strides_ + 4, samples.strides)) {
            std::copy_n(samples.strides, 4, strides_);
            places_ = places_of_sample(in, strides_);
        }
        move_samples<Real, true>(machine_, in, in.data, data, samples.rows, strides_, places_);
    }

    void forward(int64_t section) override { run_forward(machine_, first(section), last(section)); }

    bool learns(int64_t section) const override { return output(section).needed; }

    void backward(int64_t section, const void* gradient) override {
        if (section == 0) machine_.values.front().gathered = false;
        for (size_t n = first(section); n < last(section); ++n)
            machine_.value(machine_.code[n].output).gathered = false;
        const Value<Real>& out = output(section);
        auto* numbers = const_cast<Real*>(static_cast<const Real*>(gradient));
        move_batch<Real, true>(machine_, out, out.gradient, numbers);
        machine_.values[last(section)].gathered = true;
        run_backward(machine_, first(section), last(section));
    }

    void read(int64_t value, void* samples) const override {
        const Value<Real>& from = machine_.values[static_cast<size_t>(value)];
        move_batch<Real, false>(machine_, from, from.data, static_cast<Real*>(samples));
    }

    bool has_memory(int64_t value) const override { return !machine_.values[static_cast<size_t>(value)].skipped; }

    void read_gradient(int64_t value, void* samples) const override {
        const Value<Real>& from = machine_.values[static_cast<size_t>(value)];
        if (from.gathered) move_batch<Real, false>(machine_, from, from.gradient, static_cast<Real*>(samples));
    }

 private:
    size_t first(int64_t section) const { return section == 0 ? 0 : last(section - 1); }
    size_t last(int64_t section) const { return static_cast<size_t>(ends_[static_cast<size_t>(section)]); }
    // Instruction n writes value n + 1.
    const Value<Real>& output(int64_t section) const { return machine_.values[last(section)]; }

    void count(int64_t samples) {
        machine_.samples = samples;
        machine_.groups = (samples + kLanes - 1) / kLanes;
    }

    // Numbers of the values [first, last) and of their gradients.
    int64_t size_of(size_t first_value, size_t last_value) const {
        int64_t size = 0;
        for (size_t v = first_value; v < last_value; ++v) {
            const Value<Real>& value = machine_.values[v];
            if (value.skipped) continue;
            size += (machine_.groups * value.group() + kApart) * (value.needed ? 2 : 1);
        }
        return size;
    }
    int64_t size_of(int64_t section) const { return size_of(first(section) + 1, last(section) + 1); }

    // Where the next number may lie. Gaps in memory that sections share are not guarded: other values lie there, too.
    static Real* behind(Real* end, bool guarded) {
        if (guarded) ASAN_POISON_MEMORY_REGION(end, kApart * sizeof(Real));
        return end + kApart;
    }

    void place(size_t first_value, size_t last_value, Real* at) {
        for (size_t v = first_value; v < last_value; ++v) {
            Value<Real>& value = machine_.values[v];
            if (value.skipped) continue;
            const int64_t size = machine_.groups * value.group();
            value.data = at;
            at = behind(at + size, first_value == 0);
            if (!value.needed) continue;
            value.gradient = at;
            at = behind(at + size, first_value == 0);
        }
    }

    // Gives values their memory; sections after the first share it. It is kept for the next runner of this thread, so
    // that it is mapped once.
    void lay_out() {
        static thread_local Numbers<Real> memory;
        const auto sections = static_cast<int64_t>(ends_.size());
        const int64_t main = size_of(0, last(0) + 1);
        int64_t largest = 0;
        for (int64_t s = 1; s < sections; ++s) largest = std::max(largest, size_of(s));
        const auto numbers = static_cast<size_t>(main + largest);
        ASAN_UNPOISON_MEMORY_REGION(memory.data(), memory.size() * sizeof(Real));
        if (memory.size() < numbers) memory.resize(numbers);
        if (kApart > 0) std::fill(memory.begin(), memory.end(), static_cast<Real>(NAN));
        place(0, last(0) + 1, memory.data());
        for (int64_t s = 1; s < sections; ++s) place(first(s) + 1, last(s) + 1, memory.data() + main);
    }

    Machine<Real> machine_;
    std::vector<int64_t> ends_;
    int64_t strides_[4] = {};  // of the samples of the last batch
    std::vector<int64_t> places_;
};

}  // namespace
}  // namespace esper::tape
