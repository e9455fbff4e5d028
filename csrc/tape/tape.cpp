// The operator that runs a tape on the CPU.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <optional>

#include "program.h"

namespace esper::tape {
namespace {

// The pass for the machine that this process is on.
auto pass_of_machine() {
#if defined(ESPER_CPU_LEVELS)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")) {
        return pass_v4;
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return pass_v3;
#endif
    return pass_default;
}

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
    if (program.tensors.empty()) program.is_double = dtype_of(input.get()) == Dtype::kFloat64;
    int64_t samples = -1;
    Pass pass{};
    pass.code = program.code.data();
    pass.instructions = static_cast<int64_t>(program.code.size());
    pass.shapes = program.shapes;
    pass.value_count = program.values;
    pass.tensors = program.tensors.data();
    pass.tensor_count = static_cast<int64_t>(program.tensors.size());
    pass.training = training;
    pass.input = batch_data(input, program, 0, samples, "the input");
    pass.output = batch_data(output, program, program.values - 1, samples, "the output");
    if (output_gradient) {
        pass.output_gradient =
            batch_data(*output_gradient, program, program.values - 1, samples, "the gradient of the output");
    }
    if (input_gradient) {
        pass.input_gradient = batch_data(*input_gradient, program, 0, samples, "the gradient of the input");
    }
    pass.samples = samples;
    for (const Instruction& i : program.code) {
        if (i.layer != kBatchNorm || !training || i.number[5] != 0) continue;
        const int64_t* shape = program.shapes + 3 * i.input;
        check(samples * shape[1] * shape[2] > 1,
              "tape_pass_: a batch norm in training needs more than one value a channel");
    }
    pass_of_machine()(pass, program.is_double);
}

}  // namespace
}  // namespace esper::tape

STABLE_TORCH_LIBRARY_IMPL(esper, CPU, m) {
    m.impl("tape_pass_", &esper::tape::tape_pass);
}
