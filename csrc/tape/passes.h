// A whole pass over a tape: which layer runs when, and how samples come in and out.
#pragma once

#include "batch_norm.h"
#include "convolution.h"
#include "elementwise.h"
#include "group_norm.h"
#include "kernels.h"
#include "pool.h"
#include "seed.h"

namespace esper::tape {
namespace {

template <typename Real>
void run_forward(Machine<Real>& machine, size_t first, size_t last) {
    for (size_t n = first; n < last; ++n) {
        const Instruction& i = machine.code[n];
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
            default:
                pass_through_backward(machine, i);
                break;
        }
    }
}

// Finds the borders of values and which gradients are wanted.
template <typename Real>
void prepare(Machine<Real>& machine, const Network& network) {
    machine.saved.resize(machine.code.size());
    machine.values[0].needed = network.input_gradient;
    for (const Instruction& i : machine.code) {
        Value<Real>& in = machine.value(i.input);
        Value<Real>& out = machine.value(i.output);
        if (i.layer == kConvolution) {
            const Convolution layer(i);
            in.border = std::max(in.border, layer.input_border());
            out.border = std::max(out.border, layer.gradient_border({in.height, in.width}, {out.height, out.width}));
        }
        if (!network.backward || i.layer == kDetach) continue;
        out.needed = in.needed || (i.other >= 0 && machine.value(i.other).needed);
        const int64_t parameters = i.layer == kScale ? 1 : i.layer <= kGroupNorm ? 2 : 0;
        for (int64_t p = 0; p < parameters; ++p) {
            if (i.number[p] >= 0 && machine.gradient(i.number[p]) != nullptr) out.needed = true;
        }
    }
}

// Between samples in memory and the lanes of a value.
template <typename Real, bool kIn>
void move_samples(const Machine<Real>& machine, const Value<Real>& value, Real* lanes, Real* samples,
                  const int64_t* rows, const int64_t* strides) {
    for (int64_t n = 0; n < machine.samples; ++n) {
        Real* sample = samples + (rows == nullptr ? n : rows[n]) * strides[0];
        for (int64_t c = 0; c < value.channels; ++c) {
            Real* plane = lanes + value.at(n / kLanes, c) + n % kLanes;
            for (int64_t y = 0; y < value.height; ++y) {
                Real* from = sample + c * strides[1] + y * strides[2];
                for (int64_t x = 0; x < value.width; ++x) {
                    if constexpr (kIn) {
                        plane[y * value.row() + x * kLanes] = from[x * strides[3]];
                    } else {
                        from[x * strides[3]] = plane[y * value.row() + x * kLanes];
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
        move_samples<Real, true>(machine_, in, in.data, data, samples.rows, samples.strides);
    }

    void forward(int64_t section) override {
        // Sections after the first share their memory.
        if (section > 0 && ends_.size() > 2) std::fill_n(shared_, size_of(section), Real{});
        run_forward(machine_, first(section), last(section));
    }

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

    void read_input_gradient(void* samples) const override {
        const Value<Real>& in = machine_.values.front();
        if (in.gathered) move_batch<Real, false>(machine_, in, in.gradient, static_cast<Real*>(samples));
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
            size += machine_.groups * value.group() * (value.needed ? 2 : 1);
        }
        return size;
    }
    int64_t size_of(int64_t section) const { return size_of(first(section) + 1, last(section) + 1); }

    void place(size_t first_value, size_t last_value, Real* at) {
        for (size_t v = first_value; v < last_value; ++v) {
            Value<Real>& value = machine_.values[v];
            const int64_t size = machine_.groups * value.group();
            value.data = at;
            at += size;
            if (!value.needed) continue;
            value.gradient = at;
            at += size;
        }
    }

    // Gives values their memory, all zero: layers write the positions inside of borders only. It is kept for the next
    // runner of this thread, so that it is mapped once.
    void lay_out() {
        static thread_local std::vector<Real> memory;
        const auto sections = static_cast<int64_t>(ends_.size());
        const int64_t main = size_of(0, last(0) + 1);
        int64_t largest = 0;
        for (int64_t s = 1; s < sections; ++s) largest = std::max(largest, size_of(s));
        const auto numbers = static_cast<size_t>(main + largest);
        if (memory.size() < numbers) memory.resize(numbers);
        std::fill_n(memory.data(), numbers, Real{});
        shared_ = memory.data() + main;
        place(0, last(0) + 1, memory.data());
        for (int64_t s = 1; s < sections; ++s) place(first(s) + 1, last(s) + 1, shared_);
    }

    Machine<Real> machine_;
    std::vector<int64_t> ends_;
    Real* shared_ = nullptr;
};

Runner* make_runner(const Network& network, bool is_double) {
    if (is_double) return new RunnerOf<double>(network);
    return new RunnerOf<float>(network);
}

}  // namespace
}  // namespace esper::tape
