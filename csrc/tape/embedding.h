// Tokens to features: a row of a table for each token, and a row of another one for its position. Samples are the
// positions of sequences, one after another; the input is the number of the token.
//
// numbers: weights of the tokens [V, C] and of the positions [T, C]; length of the sequences; whether a later layer has
// the tokens' weights, too, as a tied head does, and has written their gradient before.
#pragma once

#include <stdexcept>
#include <string>

#include "machine.h"

namespace esper::tape {
namespace {

// The rows of a table for the 16 samples of a group.
template <typename Real>
struct TableRows {
    Real* row[kLanes];
    int64_t column;  // distance of the features

    TableRows(const Tensor& table, void* numbers, const int64_t* rows, int64_t count) : column(table.strides[1]) {
        for (int64_t l = 0; l < count; ++l) row[l] = static_cast<Real*>(numbers) + rows[l] * table.strides[0];
    }
};

// Calls body(group, samples in it, their tokens, their positions).
template <typename Real, typename Body>
void for_tokens(const Machine<Real>& machine, const Instruction& instruction, const Value<Real>& in, int64_t vocabulary,
                const Body& body) {
    for (int64_t g = 0; g < machine.groups; ++g) {
        const int64_t count = machine.count(g);
        int64_t tokens[kLanes], positions[kLanes];
        for (int64_t l = 0; l < count; ++l) {
            const Real token = in.data[in.at(g, 0) + l];
            if (!(token >= 0 && token < static_cast<Real>(vocabulary))) {
                throw std::out_of_range("tape: token " + std::to_string(token) + " is not between 0 and " +
                                        std::to_string(vocabulary - 1));
            }
            tokens[l] = static_cast<int64_t>(token);
            positions[l] = (g * kLanes + l) % instruction.number[2];
        }
        body(g, count, tokens, positions);
    }
}

template <typename Real>
void embedding_forward(Machine<Real>& machine, const Instruction& instruction) {
    const Value<Real>& in = machine.value(instruction.input);
    const Value<Real>& out = machine.value(instruction.output);
    const Tensor& tokens = machine.tensors[static_cast<size_t>(instruction.number[0])];
    const Tensor& positions = machine.tensors[static_cast<size_t>(instruction.number[1])];
    for_tokens(machine, instruction, in, tokens.elements / out.channels,
               [&](int64_t g, int64_t count, const int64_t* token, const int64_t* position) {
                   const TableRows<Real> first(tokens, tokens.data, token, count);
                   const TableRows<Real> second(positions, positions.data, position, count);
                   for (int64_t c = 0; c < out.channels; ++c) {
                       Real lanes[kLanes] = {};
                       for (int64_t l = 0; l < count; ++l) {
                           lanes[l] = first.row[l][c * first.column] + second.row[l][c * second.column];
                       }
                       store(load(lanes), out.data + out.at(g, c));
                   }
               });
}

template <typename Real>
void embedding_backward(Machine<Real>& machine, const Instruction& instruction) {
    const Value<Real>& in = machine.value(instruction.input);
    const Value<Real>& out = machine.value(instruction.output);
    const Tensor* tables[2];
    for (int t = 0; t < 2; ++t) {
        tables[t] = &machine.tensors[static_cast<size_t>(instruction.number[t])];
        if (tables[t]->gradient == nullptr || (t == 0 && instruction.number[3] != 0)) continue;
        std::fill_n(static_cast<Real*>(tables[t]->gradient), tables[t]->elements, Real{});
    }
    for_tokens(machine, instruction, in, tables[0]->elements / out.channels,
               [&](int64_t g, int64_t count, const int64_t* token, const int64_t* position) {
                   for (int t = 0; t < 2; ++t) {
                       if (tables[t]->gradient == nullptr) continue;
                       const TableRows<Real> rows(*tables[t], tables[t]->gradient, t == 0 ? token : position, count);
                       for (int64_t l = 0; l < count; ++l) {
                           for (int64_t c = 0; c < out.channels; ++c) {
                               rows.row[l][c * rows.column] += out.gradient[out.at(g, c) + l];
                           }
                       }
                   }
               });
}

}  // namespace
}  // namespace esper::tape
