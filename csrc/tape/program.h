// A program as an operator receives it, checked so that no pass reads or writes beyond its tensors.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <memory>
#include <set>
#include <vector>

#include "../tensors.h"
#include "kernels.h"

namespace esper::tape {

// The checks of one instruction, whose messages start with its number.
class InstructionCheck {
 public:
    InstructionCheck(int64_t number, const Instruction& instruction, const int64_t* shapes, int64_t values,
                     const std::vector<Tensor>& tensors, std::set<int64_t>& learning)
        : number_(number), i_(instruction), shapes_(shapes), values_(values), tensors_(tensors), learning_(learning) {}

    void run() const {
        require(i_.layer >= 0 && i_.layer < kLayerCount, "there is no such layer");
        require(i_.output == number_ + 1 && i_.output < values_, "its output must be the next value");
        require(i_.input >= 0 && i_.input < i_.output, "its input must be an earlier value");
        const bool pair = i_.layer == kMultiply || i_.layer == kAdd || i_.layer == kPassThrough;
        require(pair ? i_.other >= 0 && i_.other < i_.output : i_.other == -1, "it has a wrong second input");
        switch (i_.layer) {
            case kConvolution:
                return convolution();
            case kBatchNorm:
                require(same_shape(i_.input, i_.output), "a norm keeps the shape");
                for (int t = 0; t < 2; ++t) parameter(i_.number[t], channels(i_.input));
                for (int t = 2; t < 4; ++t) fixed(i_.number[t], channels(i_.input));
                if (i_.number[4] >= 0) require(tensor(i_.number[4], 1).is_count, "the number of batches is not int64");
                return require((i_.number[2] < 0) == (i_.number[3] < 0), "running mean and variance go together");
            case kGroupNorm:
                require(same_shape(i_.input, i_.output), "a norm keeps the shape");
                for (int t = 0; t < 2; ++t) parameter(i_.number[t], channels(i_.input));
                return require(i_.number[2] > 0 && channels(i_.input) % i_.number[2] == 0,
                               "the groups do not divide the channels");
            case kMaxPool:
            case kAveragePool:
                return pool();
            case kFlatten: {
                const int64_t* in = shapes_ + 3 * i_.input;
                const int64_t* out = shapes_ + 3 * i_.output;
                return require(out[0] == in[0] * in[1] * in[2] && out[1] == 1 && out[2] == 1, "it has a wrong shape");
            }
            case kScale:
                require(i_.number[0] >= 0, "it has no weight");
                parameter(i_.number[0], channels(i_.input));
                break;
            case kMultiply: {
                const bool channel = channels(i_.other) == 1 || channels(i_.other) == channels(i_.input);
                const int64_t* shape = shapes_ + 3 * i_.other;
                const bool single = shape[1] == 1 && shape[2] == 1;
                require(channel && (single || same_positions(i_.other, i_.input)), "the factors have a wrong shape");
                break;
            }
            case kAdd:
                require(same_shape(i_.input, i_.other), "the terms differ in shape");
                if (i_.number[0] >= 0) {
                    fixed(i_.number[0], -1);
                    require(i_.number[1] >= 0 && i_.number[1] < tensor(i_.number[0], -1).elements,
                            "the tensor of its factor is too short");
                }
                break;
            case kGuard:
                require(i_.number[0] >= 0 && tensor(i_.number[0], 1).is_flag, "it has no flag");
                break;
            case kLinear:
                require(is_vector(i_.input) && is_vector(i_.output), "its values have several positions");
                require(i_.number[0] >= 0, "it has no weight");
                parameter(i_.number[0], channels(i_.output) * channels(i_.input));
                return parameter(i_.number[1], channels(i_.output));
            case kEmbedding:
                return embedding();
            case kAttention: {
                const int64_t inner = i_.number[0] * i_.number[1];
                require(i_.number[0] > 0 && i_.number[1] > 0 && i_.number[2] > 0, "it has no head, width or length");
                require(is_vector(i_.input) && is_vector(i_.output), "sequences have positions as samples");
                return require(channels(i_.input) == 3 * inner && channels(i_.output) == inner, "it has a wrong shape");
            }
            case kRunningMean:
                require(i_.number[0] > 0 && is_vector(i_.input), "sequences have a length, and positions as samples");
                break;
            case kPassThrough:
                require(same_shape(i_.input, i_.other), "the features and the delta differ in shape");
                break;
            default:
                break;
        }
        require(same_shape(i_.input, i_.output), "it keeps the shape");
    }

 private:
    void require(bool condition, const char* what) const {
        check(condition, "tape: instruction ", number_, " (layer ", i_.layer, "): ", what);
    }
    int64_t channels(int64_t value) const { return shapes_[3 * value]; }
    bool is_vector(int64_t value) const { return shapes_[3 * value + 1] == 1 && shapes_[3 * value + 2] == 1; }
    bool same_positions(int64_t a, int64_t b) const {
        return shapes_[3 * a + 1] == shapes_[3 * b + 1] && shapes_[3 * a + 2] == shapes_[3 * b + 2];
    }
    bool same_shape(int64_t a, int64_t b) const { return channels(a) == channels(b) && same_positions(a, b); }

    // The tensor `index`, which must have this number of elements; of any size if it is -1.
    const Tensor& tensor(int64_t index, int64_t elements) const {
        require(index < static_cast<int64_t>(tensors_.size()), "it names a tensor that is not there");
        const Tensor& tensor = tensors_[static_cast<size_t>(index)];
        require(elements < 0 || tensor.elements == elements, "a tensor has a wrong size");
        return tensor;
    }
    // A tensor that may learn, or -1.
    void parameter(int64_t index, int64_t elements) const {
        if (index == -1) return;
        require(index >= 0, "it names a tensor that is not there");
        const Tensor& found = tensor(index, elements);
        require(!found.is_count && !found.is_flag, "a parameter is not of numbers");
        if (found.gradient == nullptr) return;
        const bool first = learning_.insert(index).second;
        require(first, "its parameter belongs to an earlier layer, too: gradients are written once");
    }
    // A tensor of numbers that no pass differentiates, or -1.
    void fixed(int64_t index, int64_t elements) const {
        if (index == -1) return;
        require(index >= 0, "it names a tensor that is not there");
        const Tensor& found = tensor(index, elements);
        require(!found.is_count && !found.is_flag && found.gradient == nullptr,
                "a buffer is not of numbers, or has a gradient");
    }

    // The number of windows of a kernel along an axis.
    int64_t windows(int64_t length, int64_t kernel, int64_t stride, int64_t padding, int64_t dilation) const {
        return (length + 2 * padding - dilation * (kernel - 1) - 1) / stride + 1;
    }

    void convolution() const {
        const int64_t* n = i_.number;
        for (int a = 0; a < 2; ++a) {
            require(n[2 + a] > 0 && n[4 + a] > 0 && n[6 + a] >= 0 && n[8 + a] > 0, "it has a wrong kernel");
            require(shapes_[3 * i_.output + 1 + a] ==
                        windows(shapes_[3 * i_.input + 1 + a], n[2 + a], n[4 + a], n[6 + a], n[8 + a]),
                    "it has a wrong shape");
        }
        require(n[2] * n[3] <= kMaxTaps, "its kernel is too large");
        const bool depthwise = n[10] > 1;
        require(!depthwise || (n[10] == channels(i_.input) && n[10] == channels(i_.output)),
                "groups of several channels are not supported");
        const int64_t inputs = depthwise ? 1 : channels(i_.input);
        require(n[0] >= 0, "it has no weight");
        parameter(n[0], channels(i_.output) * inputs * n[2] * n[3]);
        parameter(n[1], channels(i_.output));
    }

    void embedding() const {
        require(channels(i_.input) == 1 && is_vector(i_.input) && is_vector(i_.output), "it has a wrong shape");
        require(i_.number[0] >= 0 && i_.number[1] >= 0 && i_.number[2] > 0, "it has no weights or no length");
        const int64_t width = channels(i_.output);
        const int64_t tokens = tensor(i_.number[0], -1).elements, positions = tensor(i_.number[1], -1).elements;
        require(tokens % width == 0 && positions % width == 0 && positions >= width * i_.number[2],
                "its weights have a wrong size");
        // A tied head, which comes later, writes the gradient of the tokens' weights first.
        if (i_.number[3] == 0) parameter(i_.number[0], tokens);
        parameter(i_.number[1], positions);
    }

    void pool() const {
        const int64_t* n = i_.number;
        require(channels(i_.input) == channels(i_.output), "a pool keeps the channels");
        for (int a = 0; a < 2; ++a) {
            require(n[a] > 0 && n[2 + a] > 0 && n[4 + a] >= 0 && 2 * n[4 + a] <= n[a], "it has a wrong kernel");
            const int64_t first = (shapes_[3 * i_.output + 1 + a] - 1) * n[2 + a] - n[4 + a];
            require(first < shapes_[3 * i_.input + 1 + a], "a window lies outside of its input");
        }
    }

    int64_t number_;
    const Instruction& i_;
    const int64_t* shapes_;
    int64_t values_;
    const std::vector<Tensor>& tensors_;
    std::set<int64_t>& learning_;  // parameters with a gradient, of this and of earlier instructions
};

// A program with the tensors of its network.
struct Program {
    std::vector<Instruction> code;
    std::vector<Tensor> tensors;
    std::vector<OwnedTensor> owned;
    std::vector<torch::stable::Tensor> held;
    std::vector<int64_t> ends;  // of sections, as in Network
    const int64_t* shapes = nullptr;
    int64_t values = 0;
    bool is_double = false;
    bool has_numbers = false;  // whether a tensor says what `is_double` is
};

// Reads (shapes int64 [V, 3], code int64 [N, 16], constants float64 [N, 2]), and the network's `tensors`, all float32
// or all float64 but for counts and flags, with their gradients by `gradient_of`, -1 for those that do not learn.
inline Program read_program(const torch::stable::Tensor& shapes, const torch::stable::Tensor& code,
                            const torch::stable::Tensor& constants, const OwnedList& tensors,
                            const OwnedList& gradients, const OwnedList& gradient_of) {
    Program program;
    const auto is_table = [](const torch::stable::Tensor& tensor, int32_t dtype, int64_t columns) {
        return tensor.dim() == 2 && tensor.size(1) == columns && tensor.is_contiguous() &&
               dtype_code(tensor.get()) == dtype && device_of(tensor).type == aoti_torch_device_type_cpu();
    };
    check(is_table(shapes, aoti_torch_dtype_int64(), 3), "tape: shapes must be int64 [V, 3]");
    check(is_table(code, aoti_torch_dtype_int64(), kNumbers), "tape: code must be int64 [N, ", kNumbers, "]");
    check(is_table(constants, aoti_torch_dtype_float64(), kConstants) && constants.size(0) == code.size(0),
          "tape: constants must be float64 [N, ", kConstants, "]");
    program.shapes = static_cast<const int64_t*>(shapes.const_data_ptr());
    program.values = shapes.size(0);
    for (int64_t v = 0; v < 3 * program.values; ++v) check(program.shapes[v] > 0, "tape: a value is empty");

    const int64_t count = list_size(tensors);
    check(list_size(gradient_of) == count, "tape: gradient_of needs one number for each tensor");
    std::vector<OwnedTensor> gradient_tensors;
    for (int64_t g = 0; g < list_size(gradients); ++g) gradient_tensors.push_back(take_tensor(list_item(gradients, g)));
    for (int64_t t = 0; t < count; ++t) {
        OwnedTensor owned = take_tensor(list_item(tensors, t));
        const Dtype dtype = dtype_of(owned.get());
        Tensor tensor{};
        tensor.is_count = dtype_code(owned.get()) == aoti_torch_dtype_int64();
        tensor.is_flag = dtype_code(owned.get()) == aoti_torch_dtype_bool();
        check(tensor.is_count || tensor.is_flag || dtype == Dtype::kFloat32 || dtype == Dtype::kFloat64,
              "tape: tensors must be float32 or float64");
        if (!tensor.is_count && !tensor.is_flag) {
            if (!program.has_numbers) program.is_double = dtype == Dtype::kFloat64;
            program.has_numbers = true;
            check(program.is_double == (dtype == Dtype::kFloat64), "tape: tensors must have one dtype");
        }
        const Layout layout(owned.get());
        check(layout.dims <= 4 && layout.is_dense(), "tape: tensors must be dense, with at most 4 dimensions");
        check(device_of(owned.get()).type == aoti_torch_device_type_cpu(), "tape: tensors must be on the CPU");
        tensor.data = mutable_data(owned.get());
        tensor.elements = numel_of(owned.get());
        std::copy_n(layout.strides, layout.dims, tensor.strides);
        const auto gradient = torch::stable::detail::to<int64_t>(list_item(gradient_of, t));
        if (gradient >= 0) {
            check(gradient < static_cast<int64_t>(gradient_tensors.size()), "tape: a gradient is not there");
            AtenTensorHandle handle = gradient_tensors[static_cast<size_t>(gradient)].get();
            const Layout of_gradient(handle);
            check(dtype_code(handle) == dtype_code(owned.get()) && layout.same_sizes(of_gradient) &&
                      layout.same_offsets(of_gradient),
                  "tape: a gradient differs from its tensor in dtype, shape or strides");
            tensor.gradient = mutable_data(handle);
        }
        program.owned.push_back(std::move(owned));
        program.tensors.push_back(tensor);
    }
    for (OwnedTensor& gradient : gradient_tensors) program.owned.push_back(std::move(gradient));

    std::set<int64_t> learning;
    const auto* rows = static_cast<const int64_t*>(code.const_data_ptr());
    const auto* numbers = static_cast<const double*>(constants.const_data_ptr());
    for (int64_t n = 0; n < code.size(0); ++n) {
        const int64_t* row = rows + n * kNumbers;
        Instruction instruction{row[0], row[1], row[2], row[3], {}, numbers + n * kConstants};
        std::copy_n(row + 4, kNumbers - 4, instruction.number);
        InstructionCheck(n, instruction, program.shapes, program.values, program.tensors, learning).run();
        program.code.push_back(instruction);
    }
    for (const Instruction& i : program.code) {
        const bool tied = i.layer == kEmbedding && i.number[3] != 0;
        if (!tied || program.tensors[static_cast<size_t>(i.number[0])].gradient == nullptr) continue;
        check(learning.count(i.number[0]) == 1, "tape: no layer shares the weights of a tied embedding");
    }
    program.ends.push_back(code.size(0));
    return program;
}

// Cuts a program into sections, see Network.
inline void read_sections(Program& program, const OwnedList& ends) {
    const auto instructions = static_cast<int64_t>(program.code.size());
    program.ends.clear();
    for (int64_t s = 0; s < list_size(ends); ++s) {
        const auto end = torch::stable::detail::to<int64_t>(list_item(ends, s));
        check(end > (s == 0 ? 0 : program.ends.back()) && end <= instructions, "tape: section ", s, " is empty");
        program.ends.push_back(end);
    }
    check(!program.ends.empty() && program.ends.back() == instructions, "tape: the sections have no end");
    // Memory that sections share is not read by others.
    for (size_t s = 1; s < program.ends.size(); ++s) {
        for (int64_t n = program.ends[s - 1]; n < program.ends[s]; ++n) {
            for (const int64_t value :
                 {program.code[static_cast<size_t>(n)].input, program.code[static_cast<size_t>(n)].other}) {
                check(value <= program.ends[0] || value > program.ends[s - 1], "tape: instruction ", n,
                      " reads a value of another section than its own or the first");
            }
        }
    }
}

// The runner of a program for this machine, for batches of up to `samples`.
std::unique_ptr<Runner> make_runner(const Program& program, int64_t samples, bool training, bool backward,
                                    bool input_gradient);

}  // namespace esper::tape
