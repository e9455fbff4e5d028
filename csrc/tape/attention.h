// Attention inside of sequences. Samples are their positions, one after another. Each head of a sequence is copied to
// rows [features][positions], so that scores, weights and results are products of matrices with 16 positions in lanes.
//
// numbers: heads, features of a head, length of the sequences, whether a position sees earlier ones and itself only.
// The input has the queries of all heads, then their keys, then their values.
#pragma once

#include <cmath>
#include <limits>
#include <stdexcept>

#include "machine.h"
#include "product.h"

namespace esper::tape {
namespace {

// Rows of positions, a multiple of 16.
template <typename Real>
struct Matrix {
    Real* data;
    int64_t stride;
    Real* at(int64_t row, int64_t column) const { return data + row * stride + column; }
    Rows<Real> from(int64_t row, int64_t column) const { return {at(row, column), stride}; }
    Rows<const Real> read(int64_t row, int64_t column) const { return {at(row, column), stride}; }
};

ESPER_INLINE Lanes<float> exp_negative(const Lanes<float>& x) {
    return each(x, [](const auto& part) __attribute__((always_inline)) { return Vectors<kBytes>::exp_negative(part); });
}
ESPER_INLINE Lanes<double> exp_negative(const Lanes<double>& x) {
    return by_lane(x, [](double lane) { return std::exp(lane); });
}

template <typename Real>
class Attention {
 public:
    Attention(Machine<Real>& machine, const Instruction& i)
        : machine_(machine),
          in_(machine.value(i.input)),
          out_(machine.value(i.output)),
          heads_(i.number[0]),
          width_(i.number[1]),
          length_(i.number[2]),
          causal_(i.number[3] != 0),
          room_((length_ + kLanes - 1) / kLanes * kLanes),
          scale_(Real{1} / std::sqrt(static_cast<Real>(width_))) {
        if (machine.samples % length_ != 0) throw std::invalid_argument("tape: a sequence is not whole");
        // Six matrices of a head, its scores and what is transposed, twice.
        machine.packed.assign(static_cast<size_t>((7 * width_ + 3 * room_) * room_), Real{});
        Real* at = machine.packed.data();
        for (Matrix<Real>* matrix : {&query_, &key_, &value_, &result_, &d_query_, &d_key_, &d_value_}) {
            *matrix = {at, room_};
            at += width_ * room_;
        }
        for (Matrix<Real>* matrix : {&d_weights_, &turned_, &turned_d_}) {
            *matrix = {at, room_};
            at += room_ * room_;
        }
        const int64_t size = room_ * room_;
        const int64_t sequences = machine.samples / length_;
        if (out_.needed) kept_ = machine.kept(i, sequences * heads_ * size);
    }

    void forward() {
        for_heads([&](int64_t sequence, int64_t head) {
            copy_in(sequence, head);
            weigh();
            for (int64_t t = 0; t < length_; t += kLanes) {
                product<Real>({value_.data, room_, 1}, width_, weights_.read(0, t), seen(t), result_.from(0, t));
            }
            move<false>(out_, out_.data, sequence, head * width_, result_);
        });
        clear_rest(out_, out_.data);
    }

    void backward() {
        if (!in_.needed) return;
        for_heads([&](int64_t sequence, int64_t head) {
            copy_in(sequence, head);
            move<true>(out_, out_.gradient, sequence, head * width_, result_);
            for (int64_t t = 0; t < length_; t += kLanes) {
                of_scores(t);
                product<Real>({key_.data, room_, 1}, width_, d_weights_.read(0, t), seen(t), d_query_.from(0, t));
            }
            turn(weights_, turned_);
            turn(d_weights_, turned_d_);
            for (int64_t u = 0; u < length_; u += kLanes) {
                const int64_t first = causal_ ? u : 0;  // position that sees it
                product<Real>({result_.at(0, first), room_, 1}, width_, turned_.read(first, u), length_ - first,
                              d_value_.from(0, u));
                product<Real>({query_.at(0, first), room_, 1}, width_, turned_d_.read(first, u), length_ - first,
                              d_key_.from(0, u));
            }
            const int64_t all = heads_ * width_, from = head * width_;
            give_out(sequence, from, d_query_);
            give_out(sequence, all + from, d_key_);
            give_out(sequence, 2 * all + from, d_value_);
        });
        clear_rest(in_, in_.gradient);
        in_.gathered = true;
    }

 private:
    template <typename Body>
    void for_heads(const Body& body) {
        for (int64_t sequence = 0; sequence < machine_.samples / length_; ++sequence) {
            for (int64_t head = 0; head < heads_; ++head) {
                // Without a pass backward, all heads have their weights in the same memory.
                Real* at = d_weights_.data;
                if (kept_ != nullptr) at = kept_ + (sequence * heads_ + head) * room_ * room_;
                weights_ = {at, room_};
                body(sequence, head);
            }
        }
    }

    // Positions that those from t to t + 15 see.
    int64_t seen(int64_t t) const { return causal_ ? std::min(length_, t + kLanes) : length_; }

    void copy_in(int64_t sequence, int64_t head) {
        const int64_t all = heads_ * width_, from = head * width_;
        move<true>(in_, in_.data, sequence, from, query_);
        move<true>(in_, in_.data, sequence, all + from, key_);
        move<true>(in_, in_.data, sequence, 2 * all + from, value_);
    }

    // Copies the positions of a sequence from the channels from `first` on to a matrix, or back.
    template <bool kIn>
    void move(const Value<Real>& value, Real* numbers, int64_t sequence, int64_t first, const Matrix<Real>& matrix) {
        for_pieces(sequence, [&](int64_t t, int64_t g, int64_t lane, int64_t count) {
            for (int64_t c = 0; c < width_; ++c) {
                Real* outside = numbers + value.at(g, first + c) + lane;
                Real* inside = matrix.at(c, t);
                if (kIn) std::copy_n(outside, count, inside);
                if (!kIn) std::copy_n(inside, count, outside);
            }
        });
    }

    void give_out(int64_t sequence, int64_t first, const Matrix<Real>& matrix) {
        const bool adds = in_.gathered;
        for_pieces(sequence, [&](int64_t t, int64_t g, int64_t lane, int64_t count) {
            for (int64_t c = 0; c < width_; ++c) {
                Real* to = in_.gradient + in_.at(g, first + c) + lane;
                const Real* from = matrix.at(c, t);
                for (int64_t l = 0; l < count; ++l) to[l] = adds ? to[l] + from[l] : from[l];
            }
        });
    }

    // Zeros the lanes without a sample.
    void clear_rest(const Value<Real>& value, Real* numbers) const {
        const int64_t last = machine_.groups - 1;
        for (int64_t c = 0; c < value.channels; ++c) {
            Real* lanes = numbers + value.at(last, c);
            std::fill(lanes + machine_.count(last), lanes + kLanes, Real{});
        }
    }

    // Calls body(position, group, first lane, lanes) for the pieces of a sequence that lie in one group.
    template <typename Body>
    void for_pieces(int64_t sequence, const Body& body) const {
        for (int64_t t = 0; t < length_;) {
            const int64_t sample = sequence * length_ + t;
            const int64_t lane = sample % kLanes;
            const int64_t count = std::min(length_ - t, kLanes - lane);
            body(t, sample / kLanes, lane, count);
            t += count;
        }
    }

    // Zero where position u lies behind that of the lane.
    ESPER_INLINE Lanes<Real> visible(const Lanes<Real>& lanes, int64_t u, int64_t t, Real hidden) const {
        if (!causal_ || u <= t) return lanes;
        Real values[kLanes];
        store(lanes, values);
        for (int64_t l = 0; l < u - t; ++l) values[l] = hidden;
        return load(values);
    }

    // The softmax of the scores over the positions that are seen: weights (u, t) of position u for position t.
    void weigh() {
        constexpr Real kNothing = -std::numeric_limits<Real>::infinity();
        for (int64_t t = 0; t < length_; t += kLanes) {
            const int64_t count = seen(t);
            product<Real>({key_.data, 1, room_}, count, query_.read(0, t), width_, weights_.from(0, t));
            Lanes<Real> largest = splat(kNothing);
            for (int64_t u = 0; u < count; ++u) {
                const Lanes<Real> score = visible(load(weights_.at(u, t)) * scale_, u, t, kNothing);
                store(score, weights_.at(u, t));
                largest = each(score, largest, [](const auto& a, const auto& b) __attribute__((always_inline)) {
                    return a > b ? a : b;
                });
            }
            Lanes<Real> sum = splat(Real{});
            for (int64_t u = 0; u < count; ++u) {
                const Lanes<Real> weight = visible(exp_negative(load(weights_.at(u, t)) - largest), u, t, Real{});
                store(weight, weights_.at(u, t));
                sum = sum + weight;
            }
            const Lanes<Real> share = splat(Real{1}) / sum;
            for (int64_t u = 0; u < count; ++u) store(load(weights_.at(u, t)) * share, weights_.at(u, t));
        }
    }

    // From the gradient of the result to that of the scores: w (dw - sum over all of w dw), times the scale.
    void of_scores(int64_t t) {
        const int64_t count = seen(t);
        product<Real>({value_.data, 1, room_}, count, result_.read(0, t), width_, d_weights_.from(0, t));
        Lanes<Real> sum = splat(Real{});
        for (int64_t u = 0; u < count; ++u) sum = fma(load(weights_.at(u, t)), load(d_weights_.at(u, t)), sum);
        for (int64_t u = 0; u < count; ++u) {
            const Lanes<Real> slope = load(weights_.at(u, t)) * (load(d_weights_.at(u, t)) - sum) * scale_;
            store(visible(slope, u, t, Real{}), d_weights_.at(u, t));
        }
    }

    // Transposes the blocks of weights that are not zero.
    void turn(const Matrix<Real>& from, const Matrix<Real>& to) const {
        for (int64_t t = 0; t < length_; t += kLanes) {
            for (int64_t u = 0; u < seen(t); u += kLanes) {
                transpose<Real>(from.read(u, t), kLanes, to.from(t, u));
            }
        }
    }

    Machine<Real>& machine_;
    Value<Real>& in_;
    const Value<Real>& out_;
    int64_t heads_, width_, length_;
    bool causal_;
    int64_t room_;  // for the positions of a sequence
    Real scale_;
    Real* kept_ = nullptr;
    Matrix<Real> query_, key_, value_, result_, d_query_, d_key_, d_value_, weights_, d_weights_, turned_, turned_d_;
};

}  // namespace
}  // namespace esper::tape
