// Every operator of Esper on one page, and what this build is.
//
// Kernels register themselves at the end of their own file: csrc/cpu/NAME.cpp here, csrc/cuda/NAME.cu in the module
// esper._C_cuda. Fake kernels, and the autograd of operators that have one, are in esper/ops/NAME.py.
#include <torch/csrc/stable/library.h>

#include <string>

#include "cpu/simd.h"

namespace {

std::string built_with() {
    std::string text = "torch " TORCH_VERSION;
#if defined(__clang__)
    text += ", clang " __clang_version__;
#elif defined(__GNUC__)
    text += ", gcc " __VERSION__;
#endif
    text += ", C++" + std::to_string(__cplusplus / 100 % 100);
#if defined(ESPER_CPU_CLONES)
    text += ", x86-64 + AVX2 + AVX-512 chosen at run time";
#endif
    return text;
}

}  // namespace

STABLE_TORCH_LIBRARY(esper, m) {
    // What the CPU module was compiled with.
    m.def("built_with() -> str");

    // Statistics of groups of gradients: fields float64 [G, 13], norms float64 [N]. See csrc/grad_stats.h.
    m.def(
        "grad_stats(Tensor[] gradients, int[] group_sizes, float max_norm, float exploding_norm) "
        "-> (Tensor fields, Tensor norms)");
    m.def(
        "grad_stats.out(Tensor[] gradients, int[] group_sizes, float max_norm, float exploding_norm, *, "
        "Tensor(a!) fields, Tensor(b!) norms, Tensor(c!) scratch) -> ()");

    // Mean loss [], correct per target uint8, statistics float64 [5], and for backward, per row, (largest logit, log of
    // the sum of exponentials) [N, 2]. See csrc/cross_entropy.h.
    m.def(
        "cross_entropy(Tensor logits, Tensor targets, int ignore_index, float label_smoothing) "
        "-> (Tensor loss, Tensor correct, Tensor stats, Tensor normaliser)");
    // cross_entropy_forward is the same kernel without autograd, for a caller that has its own.
    m.def(
        "cross_entropy_forward(Tensor logits, Tensor targets, int ignore_index, float label_smoothing) "
        "-> (Tensor loss, Tensor correct, Tensor stats, Tensor normaliser)");
    m.def(
        "cross_entropy_backward(Tensor grad_loss, Tensor logits, Tensor targets, Tensor normaliser, Tensor stats, "
        "int ignore_index, float label_smoothing) -> Tensor");
    // The same without a gradient, into row (env, configuration) of the accumulators: statistics are added to block
    // float64 [E, K, 5], samples first.. of correct [E, K, samples] (uint8, or int16 counts per sequence) are written.
    m.def(
        "cross_entropy_into(Tensor logits, Tensor targets, Tensor(a!) block, Tensor(b!)? correct, int env, "
        "int configuration, int first, int ignore_index, float label_smoothing) -> ()");
    // Adds the statistics of one cross_entropy to its row of the accumulators.
    m.def("accumulate_(Tensor(a!) block, int env, int configuration, Tensor stats) -> ()");

    // Writes a batch of a dataset on the device into existing tensors: images uint8 [N, H, W, C] cropped, mirrored,
    // looked up in table float32 [C, 256] and laid out channels_last; rows of tokens [N, L]. `cursor` int64 [2] holds
    // (epoch, first) on the device. See csrc/stage_batch.h for the random placement.
    m.def(
        "stage_images(Tensor images, Tensor indices, Tensor table, Tensor? targets, int seed, int epoch, int first, "
        "Tensor? cursor, int padding, bool flip, Tensor(a!) out, Tensor(b!)? targets_out) -> ()");
    m.def(
        "stage_tokens(Tensor tokens, Tensor indices, int first, Tensor? cursor, Tensor(a!) out, "
        "Tensor(b!)? targets_out) -> ()");

    // BatchNorm2d, ReLU and optional 2x2 max-pool in channels_last: the output, statistics float32 [3, C] and, if
    // pooled, a uint8 choice per output. Without running statistics, those of the batch are used. See
    // csrc/norm_relu_pool.h.
    m.def(
        "norm_relu_pool(Tensor input, Tensor weight, Tensor bias, Tensor? running_mean, Tensor? running_var, "
        "float eps, bool pool) -> (Tensor output, Tensor statistics, Tensor choice)");
    // norm_relu_pool_forward is the same kernel without autograd, for a caller that has its own.
    m.def(
        "norm_relu_pool_forward(Tensor input, Tensor weight, Tensor bias, Tensor? running_mean, Tensor? running_var, "
        "float eps, bool pool) -> (Tensor output, Tensor statistics, Tensor choice)");
    m.def(
        "norm_relu_pool_backward(Tensor grad_output, Tensor input, Tensor weight, Tensor bias, Tensor statistics, "
        "Tensor choice, bool batch_statistics, bool pool) -> (Tensor, Tensor, Tensor)");
    m.def(
        "norm_relu_pool_update_(Tensor(a!) running_mean, Tensor(b!) running_var, Tensor(c!) num_batches_tracked, "
        "Tensor statistics, float? momentum) -> ()");

    // One SGD step of many tensors in G groups: lr [G] numbers and coef [G] are read from the device. See csrc/sgd.h.
    m.def(
        "sgd_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] momenta, int[] group_of, Tensor[] lr, "
        "float[] weight_decay, Tensor? coef, Tensor? grad_scale, Tensor? found_inf, float momentum, bool nesterov) "
        "-> ()");

    // One AdamW step, likewise; steps [N] are float32 scalars on the device, which count. See csrc/adamw.h.
    m.def(
        "adamw_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
        "Tensor(d!)[] steps, int[] group_of, Tensor[] lr, float[] weight_decay, Tensor? coef, Tensor? grad_scale, "
        "Tensor? found_inf, float beta1, float beta2, float eps) -> ()");

    // A batch through a network that is given as a list of layers, and back: writes the output [B, ...] and, with a
    // gradient of it, the gradients of tensors and of the input. tape_look_ also writes the numbers of some values, and
    // their gradients. See csrc/tape/tape.h.
    const std::string pass =
        "(Tensor shapes, Tensor code, Tensor constants, Tensor(a!)[] tensors, Tensor(b!)[] gradients, "
        "int[] gradient_of, Tensor input, Tensor(c!) output, Tensor? output_gradient, Tensor(d!)? input_gradient, "
        "bool training";
    m.def(("tape_pass_" + pass + ") -> ()").c_str());
    m.def(("tape_look_" + pass + ", int[] values, Tensor(e!)[] numbers, Tensor(f!)[] number_gradients) -> ()").c_str());
    // An epoch of training in one call: the sections of a program, each with a loss of its own (`ends`), on batches of
    // x [N, ...] in `order`, from a `table` if they are bytes; learning rates; owners of gradients, the host first; and
    // the arguments of grad_stats and of an optimizer. See csrc/tape/epoch.cpp.
    const std::string epoch =
        "(Tensor shapes, Tensor code, Tensor constants, Tensor(a!)[] tensors, Tensor(b!)[] gradients, "
        "int[] gradient_of, int[] ends, Tensor x, Tensor y, Tensor? table, Tensor(c!)? staged, Tensor order, "
        "int batch_size, int seed, int epoch, int padding, bool flip, int loss, int score, "
        "Tensor? variance, float label_smoothing, Tensor(d!) totals, Tensor(e!)[] rates, float[] factors, "
        "int[] warmup_steps, int[] steps_done, Tensor(f!)[] finite, int[] with_host, Tensor(g!) sums, "
        "int cancelled, Tensor(h!) progress, Tensor(i!) coefficients, Tensor[] owned_gradients, int[] group_sizes, "
        "float max_norm, float exploding_norm, ";
    m.def(("tape_epoch_sgd_" + epoch +
           "Tensor(j!)[] params, Tensor[] grads, Tensor(k!)[] momenta, int[] group_of, Tensor[] lr, "
           "float[] weight_decay, Tensor? coef, Tensor? grad_scale, Tensor? found_inf, float momentum, bool nesterov) "
           "-> ()")
              .c_str());
    m.def(("tape_epoch_adamw_" + epoch +
           "Tensor(j!)[] params, Tensor[] grads, Tensor(k!)[] exp_avgs, Tensor(l!)[] exp_avg_sqs, Tensor(m!)[] steps, "
           "int[] group_of, Tensor[] lr, float[] weight_decay, Tensor? coef, Tensor? grad_scale, Tensor? found_inf, "
           "float beta1, float beta2, float eps) -> ()")
              .c_str());
    // Sums [K, 5] and scores [K, N] of samples x [N, ...] for several outputs of a program.
    m.def(
        "tape_scores_(Tensor shapes, Tensor code, Tensor constants, Tensor(a!)[] tensors, Tensor[] gradients, "
        "int[] gradient_of, int[] ends, int[] outputs, Tensor x, Tensor y, int loss, int score, "
        "Tensor? variance, float label_smoothing, Tensor(b!) sums, Tensor(c!) scores, int batch_size) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(esper, CompositeExplicitAutograd, m) {
    m.impl("built_with", TORCH_BOX(&built_with));
}
