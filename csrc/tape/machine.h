// What a tape computes on: the planes of its values, in one piece of memory.
#pragma once

#include <algorithm>
#include <new>
#include <vector>

#include "lanes.h"

namespace esper::tape {
namespace {

// Memory whose first number begins a line of the cache, so that no load of a vector reads from two.
template <typename Real>
struct AlignedAllocator {
    using value_type = Real;
    static constexpr std::align_val_t kLine{64};

    AlignedAllocator() = default;
    template <typename Other>
    AlignedAllocator(const AlignedAllocator<Other>&) {}
    Real* allocate(size_t count) { return static_cast<Real*>(::operator new(count * sizeof(Real), kLine)); }
    void deallocate(Real* memory, size_t) { ::operator delete(memory, kLine); }
    bool operator==(const AlignedAllocator&) const { return true; }
    bool operator!=(const AlignedAllocator&) const { return false; }
};
template <typename Real>
using Numbers = std::vector<Real, AlignedAllocator<Real>>;

// Features [B, C, H, W] as [B / 16][C][H][W][16]; a vector [B, D] has positions of 1 × 1. A plane has 16 numbers more,
// without which the planes of channels would share sets of the cache.
//
// Lanes beyond the samples of a batch hold finite numbers in `data` and zeros in `gradient`.
template <typename Real>
struct Value {
    int64_t channels = 0;
    int64_t height = 0;
    int64_t width = 0;
    Real* data = nullptr;
    Real* gradient = nullptr;
    bool needed = false;    // whether its gradient is wanted
    bool gathered = false;  // whether its gradient has been written in this pass, so that more is added
    bool skipped = false;   // whether it is only ever in registers, and has no memory

    int64_t positions() const { return height * width; }
    int64_t row() const { return width * kLanes; }
    int64_t elements() const { return positions() * kLanes; }
    int64_t plane() const { return elements() + (positions() > 1 ? kLanes : 0); }
    int64_t group() const { return channels * plane(); }
    int64_t at(int64_t g, int64_t c) const { return g * group() + c * plane(); }
};

template <typename Real>
struct Machine {
    std::vector<Value<Real>> values;
    std::vector<Tensor> tensors;
    std::vector<Instruction> code;
    int64_t samples = 0;
    int64_t groups = 0;
    bool training = false;             // batch norms use the statistics of the batch and update their own
    Numbers<Real> packed;              // weights, or products, in the order in which a layer reads them
    std::vector<double> joined;        // sums over all samples
    std::vector<Numbers<Real>> saved;  // by instruction: what its backward pass reads again

    // Samples in group g.
    int64_t count(int64_t g) const { return std::min<int64_t>(kLanes, samples - g * kLanes); }

    Real* data(int64_t tensor) const { return static_cast<Real*>(tensors[static_cast<size_t>(tensor)].data); }
    Real* gradient(int64_t tensor) const { return static_cast<Real*>(tensors[static_cast<size_t>(tensor)].gradient); }
    Value<Real>& value(int64_t number) { return values[static_cast<size_t>(number)]; }
    // Numbers that instruction `i` keeps from its forward for its backward pass.
    Real* kept(const Instruction& i, int64_t count) {
        Numbers<Real>& numbers = saved[static_cast<size_t>(&i - code.data())];
        if (static_cast<int64_t>(numbers.size()) < count) numbers.resize(static_cast<size_t>(count));
        return numbers.data();
    }
};

// Calls body(offset, group, channel) for each position of a value, and of any other of the same shape.
template <typename Real, typename Body>
ESPER_INLINE void for_positions(const Machine<Real>& machine, const Value<Real>& value, const Body& body) {
    for (int64_t g = 0; g < machine.groups; ++g) {
        for (int64_t c = 0; c < value.channels; ++c) {
            const int64_t first = value.at(g, c);
            for (int64_t i = 0; i < value.elements(); i += kLanes) body(first + i, g, c);
        }
    }
}

// The gradient of a value that is gathered by additions starts at zero.
template <typename Real>
void start_gradient(const Machine<Real>& machine, Value<Real>& value) {
    if (value.gathered) return;
    std::fill_n(value.gradient, machine.groups * value.group(), Real{});
    value.gathered = true;
}

// Writes the gradient at a position, or adds to what is known of it.
template <typename Real>
ESPER_INLINE void give(const Lanes<Real>& gradient, bool adds, Real* at) {
    store(adds ? load(at) + gradient : gradient, at);
}

}  // namespace
}  // namespace esper::tape
