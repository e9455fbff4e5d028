// Fused AdamW on the CPU.
//
// Policy: every parameter, gradient and moment is read once and written once, by plain loops that the compiler turns
// into vectors; one thread, since the tensors of an env's network are small and an env has one thread.
#include <torch/csrc/stable/library.h>

#include "../adamw_arguments.h"
#include "elements.h"
#include "simd.h"
#include "step.h"

namespace esper::adamw {
namespace {

// Steps `n` elements of one storage type.
template <typename Type>
ESPER_INLINE void step_elements(const Tensor& tensor, const Factors<typename Type::Math>& factors, int64_t n) {
    using Math = typename Type::Math;
    auto* __restrict__ p = static_cast<typename Type::Storage*>(tensor.parameter);
    const auto* __restrict__ g = static_cast<const typename Type::Storage*>(tensor.gradient);
    auto* __restrict__ m = static_cast<typename Type::Storage*>(tensor.mean);
    auto* __restrict__ v = static_cast<typename Type::Storage*>(tensor.square);
    for (int64_t i = 0; i < n; ++i) {
        Math parameter = Type::value(p[i]);
        Math mean = Type::value(m[i]);
        Math square = Type::value(v[i]);
        step(parameter, Type::value(g[i]), mean, square, factors);
        p[i] = Type::storage(parameter);
        m[i] = Type::storage(mean);
        v[i] = Type::storage(square);
    }
}

ESPER_CLONES void step_float32(const Tensor& tensor, const Factors<float>& factors) {
    step_elements<UnchangedElement<float>>(tensor, factors, tensor.elements);
}
ESPER_CLONES void step_bfloat16(const Tensor& tensor, const Factors<float>& factors) {
    step_elements<BFloat16Element>(tensor, factors, tensor.elements);
}
ESPER_CLONES void step_float64(const Tensor& tensor, const Factors<double>& factors) {
    step_elements<UnchangedElement<double>>(tensor, factors, tensor.elements);
}

}  // namespace

void step_all(const Arguments& arguments) {
    for (const Tensor& tensor : arguments.tensors) {
        const optimizer::Group& group = arguments.groups[static_cast<size_t>(tensor.group)];
        const double scale = gradient_scale(group.coefficient, arguments.scaler);
        if (scale == 0) continue;
        *tensor.step += 1;
        const Factors<double> factors =
            factors_of(read(group.lr, 0), group.weight_decay, scale, *tensor.step, arguments.settings);
        if (tensor.dtype == Dtype::kFloat64) {
            step_float64(tensor, factors);
        } else if (tensor.dtype == Dtype::kFloat32) {
            step_float32(tensor, rounded<float>(factors));
        } else {
            step_bfloat16(tensor, rounded<float>(factors));
        }
    }
}

namespace {

void adamw_step(StableIValue* stack, uint64_t, uint64_t) {
    step_all(read_arguments(stack));
}

}  // namespace
}  // namespace esper::adamw

STABLE_TORCH_LIBRARY_IMPL(esper, CPU, m) {
    m.impl("adamw_step_", &esper::adamw::adamw_step);
}
