// The mean over the positions of a sequence up to each, which the gates of seeds read. Samples are positions.
//
// numbers: length of the sequences.
#pragma once

#include "machine.h"

namespace esper::tape {
namespace {

template <typename Real>
void running_mean_forward(Machine<Real>& machine, const Instruction& instruction) {
    const Value<Real>& in = machine.value(instruction.input);
    const Value<Real>& out = machine.value(instruction.output);
    const int64_t length = instruction.number[0];
    for (int64_t c = 0; c < in.channels; ++c) {
        double sum = 0;
        for (int64_t s = 0; s < machine.groups * kLanes; ++s) {
            const int64_t at = in.at(s / kLanes, c) + s % kLanes;
            if (s % length == 0) sum = 0;
            sum += static_cast<double>(in.data[at]);
            out.data[at] = static_cast<Real>(sum / static_cast<double>(s % length + 1));
        }
    }
}

template <typename Real>
void running_mean_backward(Machine<Real>& machine, const Instruction& instruction) {
    Value<Real>& in = machine.value(instruction.input);
    const Value<Real>& out = machine.value(instruction.output);
    if (!in.needed) return;
    const int64_t length = instruction.number[0];
    start_gradient(machine, in);
    for (int64_t c = 0; c < in.channels; ++c) {
        double sum = 0;
        for (int64_t s = machine.samples; s-- > 0;) {
            const int64_t at = in.at(s / kLanes, c) + s % kLanes;
            if (s % length == length - 1) sum = 0;
            sum += static_cast<double>(out.gradient[at]) / static_cast<double>(s % length + 1);
            in.gradient[at] += static_cast<Real>(sum);
        }
    }
}

}  // namespace
}  // namespace esper::tape
