// The operator that runs a batch through a tape on the CPU, and the runners of this machine.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <optional>
#include <utility>
#include <vector>

#include "program.h"

namespace esper::tape {

Runner::~Runner() = default;

namespace {

Runner* runner_of_machine(const Network& network, bool is_double) {
#if defined(ESPER_CPU_LEVELS)
    __builtin_cpu_init();
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (!is_double && avx512) return make_runner_v4(network);
    if (!is_double && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return make_runner_v3(network);
#endif
    return make_runner_default(network, is_double);
}

}  // namespace

std::unique_ptr<Runner> make_runner(const Program& program, int64_t samples, bool training, bool backward,
                                    bool input_gradient) {
    for (const Instruction& i : program.code) {
        if (i.layer != kBatchNorm || !training || i.number[5] != 0) continue;
        const int64_t* shape = program.shapes + 3 * i.input;
        check(samples * shape[1] * shape[2] > 1, "tape: a batch norm in training needs more than one value a channel");
    }
    Network network{};
    network.code = program.code.data();
    network.ends = program.ends.data();
    network.sections = static_cast<int64_t>(program.ends.size());
    network.shapes = program.shapes;
    network.value_count = program.values;
    network.tensors = program.tensors.data();
    network.tensor_count = static_cast<int64_t>(program.tensors.size());
    network.samples = samples;
    network.training = training;
    network.backward = backward;
    network.input_gradient = input_gradient;
    return std::unique_ptr<Runner>(runner_of_machine(network, program.is_double));
}

namespace {

// The numbers of a batch [B, ...] of a value; `samples` is B, or -1 if it is not known yet.
void* batch_data(const torch::stable::Tensor& tensor, const Program& program, int64_t value, int64_t& samples,
                 const char* what) {
    const int64_t* shape = program.shapes + 3 * value;
    const bool is_double = dtype_of(tensor.get()) == Dtype::kFloat64;
    check(tensor.dim() > 0 && tensor.is_contiguous() && is_double == program.is_double &&
              (is_double || dtype_of(tensor.get()) == Dtype::kFloat32) &&
              device_of(tensor).type == aoti_torch_device_type_cpu(),
          "tape_pass_: ", what, " must be contiguous, on the CPU, in the dtype of the network");
    if (samples < 0) samples = tensor.size(0);
    check(
        tensor.size(0) == samples && samples > 0 && numel_of(tensor.get()) == samples * shape[0] * shape[1] * shape[2],
        "tape_pass_: ", what, " has shape ", shape_of(tensor), "; expected ", samples, " times ", shape[0], " × ",
        shape[1], " × ", shape[2]);
    return mutable_data(tensor.get());
}

using Seen = std::vector<std::pair<int64_t, void*>>;

// Where the numbers of values go, [B, ...] each; nowhere if there are no tensors.
Seen seen_values(const std::vector<int64_t>& values, StableIValue tensors, const Program& program, int64_t samples) {
    const OwnedList into = take_list(tensors);
    const int64_t count = list_size(into);
    check(count == 0 || count == static_cast<int64_t>(values.size()),
          "tape_look_: one tensor for each value that is to be seen");
    Seen result;
    for (int64_t n = 0; n < count; ++n) {
        const int64_t value = values[static_cast<size_t>(n)];
        check(value >= 0 && value < program.values, "tape_look_: there is no value ", value);
        const auto tensor = torch::stable::detail::to<torch::stable::Tensor>(list_item(into, n));
        result.emplace_back(value, batch_data(tensor, program, value, samples, "a value that is to be seen"));
    }
    return result;
}

template <bool kLooks>
void tape_pass(StableIValue* stack, uint64_t, uint64_t) {
    using torch::stable::detail::to;
    using StableTensor = torch::stable::Tensor;
    const auto shapes = to<StableTensor>(stack[0]);
    const auto code = to<StableTensor>(stack[1]);
    const auto constants = to<StableTensor>(stack[2]);
    const OwnedList tensors = take_list(stack[3]), gradients = take_list(stack[4]), gradient_of = take_list(stack[5]);
    const auto input = to<StableTensor>(stack[6]);
    const auto output = to<StableTensor>(stack[7]);
    const auto output_gradient = to<std::optional<StableTensor>>(stack[8]);
    const auto input_gradient = to<std::optional<StableTensor>>(stack[9]);
    const bool training = to<bool>(stack[10]);

    Program program = read_program(shapes, code, constants, tensors, gradients, gradient_of);
    if (!program.has_numbers) program.is_double = dtype_of(input.get()) == Dtype::kFloat64;
    const int64_t last = program.values - 1;
    int64_t samples = -1;
    const int64_t* shape = program.shapes;
    const Samples batch{batch_data(input, program, 0, samples, "the input"),
                        nullptr,
                        {shape[0] * shape[1] * shape[2], shape[1] * shape[2], shape[2], 1}};
    void* const result = batch_data(output, program, last, samples, "the output");
    const void* gradient = nullptr;
    void* gradient_of_input = nullptr;
    if (output_gradient) gradient = batch_data(*output_gradient, program, last, samples, "the gradient of the output");
    if (input_gradient)
        gradient_of_input = batch_data(*input_gradient, program, 0, samples, "the gradient of the input");
    Seen seen, seen_gradients;
    if constexpr (kLooks) {
        const OwnedList numbers = take_list(stack[11]);
        std::vector<int64_t> values;
        for (int64_t n = 0; n < list_size(numbers); ++n) values.push_back(to<int64_t>(list_item(numbers, n)));
        seen = seen_values(values, stack[12], program, samples);
        seen_gradients = seen_values(values, stack[13], program, samples);
    }
    check(last == static_cast<int64_t>(program.code.size()), "tape_pass_: the last value is not the output");

    const std::unique_ptr<Runner> runner =
        make_runner(program, samples, training, gradient != nullptr, gradient_of_input != nullptr);
    runner->load(batch, samples);
    if (last > 0) runner->forward(0);
    runner->read(last, result);
    for (const auto& [value, at] : seen) {
        check(runner->has_memory(value), "tape_look_: value ", value, " is only in registers");
        runner->read(value, at);
    }
    if (gradient == nullptr || !runner->learns(0)) return;
    runner->backward(0, gradient);
    if (gradient_of_input != nullptr) runner->read_gradient(0, gradient_of_input);
    for (const auto& [value, at] : seen_gradients) {
        check(runner->has_memory(value), "tape_look_: value ", value, " is only in registers");
        runner->read_gradient(value, at);
    }
}

}  // namespace
}  // namespace esper::tape

STABLE_TORCH_LIBRARY_IMPL(esper, CPU, m) {
    m.impl("tape_pass_", &esper::tape::tape_pass<false>);
    m.impl("tape_look_", &esper::tape::tape_pass<true>);
}
