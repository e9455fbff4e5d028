// Normalisation, ReLU and 2x2 max-pool on the CPU, forward and backward.
//
// Policy: two passes over the input each way, one thread. Channels are cut into tiles of sixteen and a rest, whose
// statistics and parameters stay in registers while the tile's pixels go by; eight channels go two pixels at a time.
// Sums are float32 over a block of some hundred pixels and joined in float64. Passes that know windows go by pairs of
// rows; with and without the pool they visit the same places in the same order, so that a pool outside gives the same
// bits as the one inside.
// Each storage type is compiled by itself, at the same time as the other: norm_relu_pool_float32.cpp and _bfloat16.cpp.
#pragma GCC diagnostic ignored "-Wpsabi"  // see simd.h; before all headers, for norm_relu_pool.h

#include <torch/csrc/stable/library.h>

#include "norm_relu_pool_passes.h"

namespace esper::norm_relu_pool {
namespace {

void run(Pass pass, ScalarType dtype, const Work& work) {
    if (work.shape.pixels() * work.shape.channels == 0) return;
    if (dtype == ScalarType::Float) {
        run_float32(pass, work);
    } else {
        run_bfloat16(pass, work);
    }
}

// --- operators -----------------------------------------------------------------------------------------------------

// A channel's moments from those of its lanes.
Moments moments_of_channel(const Channels& channels, ScalarType dtype, int64_t channel, int64_t pixels) {
    const size_t lane = channels.lane(dtype, channel);
    const auto count = static_cast<double>(pixels);
    if (!channels.flat) return Moments{count, channels.total[lane], channels.total_other[lane]};
    const size_t other = channels.lane(dtype, channel, 1);
    const double distance = channels.total[other] - channels.total[lane];
    return Moments{count, channels.total[lane] + distance / 2,
                   channels.total_other[lane] + channels.total_other[other] + distance * distance * count / 4};
}

double total_of_channel(const Channels& channels, const std::vector<double>& totals, ScalarType dtype,
                        int64_t channel) {
    const double total = totals[channels.lane(dtype, channel)];
    return channels.flat ? total + totals[channels.lane(dtype, channel, 1)] : total;
}

std::tuple<Tensor, Tensor, Tensor> forward(const Tensor& input, const Tensor& weight, const Tensor& bias,
                                           std::optional<Tensor> running_mean, std::optional<Tensor> running_var,
                                           double eps, bool pool) {
    const Shape shape = checked_input(input, pool);
    const Parameters parameters = checked_parameters(input, shape, weight, bias, running_mean, running_var, eps);
    Outputs outputs = make_outputs(input, shape);
    auto* statistics = static_cast<float*>(outputs.statistics.mutable_data_ptr());
    Channels channels(shape);
    const ScalarType dtype = input.scalar_type();
    Work work{};
    work.shape = shape;
    work.input = input.const_data_ptr();
    work.result = outputs.output.mutable_data_ptr();
    work.choice = static_cast<uint8_t*>(outputs.choice.mutable_data_ptr());
    work.channels = &channels;

    const bool batch = parameters.running_mean == nullptr;
    if (batch) run(Pass::kStatistics, dtype, work);
    for (int64_t c = 0; c < shape.channels; ++c) {
        Statistics row{};  // of an empty input
        if (!batch) {
            row = running_statistics(parameters.running_mean[c], parameters.running_variance[c], parameters.eps);
        } else if (shape.pixels() > 0) {
            row = statistics_of(moments_of_channel(channels, dtype, c, shape.pixels()), parameters.eps);
        }
        statistics[kMean * shape.channels + c] = row.mean;
        statistics[kInvStd * shape.channels + c] = row.inv_std;
        statistics[kVariance * shape.channels + c] = row.variance;
        const Affine affine = affine_of(row.mean, row.inv_std, parameters.weight[c], parameters.bias[c]);
        channels.set(channels.scale, dtype, c, affine.scale);
        channels.set(channels.shift, dtype, c, affine.shift);
    }
    run(Pass::kForward, dtype, work);
    return {outputs.output, outputs.statistics, outputs.choice};
}

std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& grad_output, const Tensor& input, const Tensor& weight,
                                            const Tensor& bias, const Tensor& statistics, const Tensor& choice,
                                            bool batch_statistics, bool pool) {
    const Shape shape = checked_input(input, pool);
    check_backward(grad_output, input, shape, statistics, choice);
    const Device device = device_of(input);
    const float* weights = checked_channels(weight, "weight", shape, device);
    const float* biases = checked_channels(bias, "bias", shape, device);
    const auto* rows = static_cast<const float*>(statistics.const_data_ptr());
    Gradients gradients = make_gradients(input, shape);
    Channels channels(shape);
    const ScalarType dtype = input.scalar_type();
    for (int64_t c = 0; c < shape.channels; ++c) {
        const float mean = rows[kMean * shape.channels + c];
        const Affine affine = affine_of(mean, rows[kInvStd * shape.channels + c], weights[c], biases[c]);
        channels.set(channels.mean, dtype, c, mean);
        channels.set(channels.scale, dtype, c, affine.scale);
        channels.set(channels.shift, dtype, c, affine.shift);
    }
    Work work{};
    work.shape = shape;
    work.batch_statistics = batch_statistics;
    work.input = input.const_data_ptr();
    work.gradient = grad_output.const_data_ptr();
    work.result = gradients.input.mutable_data_ptr();
    work.choice = const_cast<uint8_t*>(static_cast<const uint8_t*>(choice.const_data_ptr()));  // only read
    work.channels = &channels;

    run(Pass::kSums, dtype, work);
    auto* grad_weight = static_cast<float*>(gradients.weight.mutable_data_ptr());
    auto* grad_bias = static_cast<float*>(gradients.bias.mutable_data_ptr());
    for (int64_t c = 0; c < shape.channels; ++c) {
        const float inv_std = rows[kInvStd * shape.channels + c];
        const double sum = total_of_channel(channels, channels.total, dtype, c);
        const double dot = total_of_channel(channels, channels.total_other, dtype, c);
        grad_weight[c] = static_cast<float>(dot * inv_std);
        grad_bias[c] = static_cast<float>(sum);
        const float scale = channels.scale[channels.lane(dtype, c)];
        const Slope slope = slope_of(sum, dot, static_cast<double>(shape.pixels()), inv_std, scale);
        channels.set(channels.slope, dtype, c, slope.slope);
        channels.set(channels.offset, dtype, c, slope.offset);
    }
    run(Pass::kInputGradient, dtype, work);
    return {gradients.input, gradients.weight, gradients.bias};
}

void update(Tensor running_mean, Tensor running_var, Tensor num_batches_tracked, const Tensor& statistics,
            std::optional<double> momentum) {
    const Running running = checked_running(running_mean, running_var, num_batches_tracked, statistics, momentum);
    *running.count += 1;
    for (int64_t c = 0; c < running.channels; ++c) update_channel(running, c, *running.count);
}

}  // namespace
}  // namespace esper::norm_relu_pool

STABLE_TORCH_LIBRARY_IMPL(esper, CPU, m) {
    m.impl("norm_relu_pool", TORCH_BOX(&esper::norm_relu_pool::forward));
    m.impl("norm_relu_pool_forward", TORCH_BOX(&esper::norm_relu_pool::forward));
    m.impl("norm_relu_pool_backward", TORCH_BOX(&esper::norm_relu_pool::backward));
    m.impl("norm_relu_pool_update_", TORCH_BOX(&esper::norm_relu_pool::update));
}
