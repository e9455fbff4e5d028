// Fused SGD on the CPU.
//
// Policy: every parameter, gradient and momentum is read once and written once, by plain loops that the compiler turns
// into vectors; one thread, since the tensors of an env's network are small and an env has one thread.
#include <torch/csrc/stable/library.h>

#include "../sgd_arguments.h"
#include "elements.h"
#include "simd.h"
#include "step.h"

namespace esper::sgd {
namespace {

// Steps `n` elements of one storage type.
template <typename Type>
ESPER_INLINE void step_elements(const Tensor& tensor, const Factors<typename Type::Math>& factors, int64_t n) {
    using Math = typename Type::Math;
    auto* __restrict__ p = static_cast<typename Type::Storage*>(tensor.parameter);
    const auto* __restrict__ g = static_cast<const typename Type::Storage*>(tensor.gradient);
    auto* __restrict__ m = static_cast<typename Type::Storage*>(tensor.buffer);
    if (m == nullptr) {
        for (int64_t i = 0; i < n; ++i) {
            Math parameter = Type::value(p[i]);
            step(parameter, Type::value(g[i]), factors);
            p[i] = Type::storage(parameter);
        }
        return;
    }
    for (int64_t i = 0; i < n; ++i) {
        Math parameter = Type::value(p[i]);
        Math buffer = Type::value(m[i]);
        step(parameter, Type::value(g[i]), buffer, factors);
        p[i] = Type::storage(parameter);
        m[i] = Type::storage(buffer);
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

template <typename T>
Factors<T> factors_of(const Arguments& arguments, const optimizer::Group& group, double scale) {
    return Factors<T>{static_cast<T>(read(group.lr, 0)), static_cast<T>(scale), static_cast<T>(group.weight_decay),
                      static_cast<T>(arguments.momentum), arguments.nesterov};
}

}  // namespace

void step_all(const Arguments& arguments) {
    for (const Tensor& tensor : arguments.tensors) {
        const optimizer::Group& group = arguments.groups[static_cast<size_t>(tensor.group)];
        const double scale = gradient_scale(group.coefficient, arguments.scaler);
        if (scale == 0) continue;
        if (tensor.dtype == Dtype::kFloat64) {
            step_float64(tensor, factors_of<double>(arguments, group, scale));
        } else if (tensor.dtype == Dtype::kFloat32) {
            step_float32(tensor, factors_of<float>(arguments, group, scale));
        } else {
            step_bfloat16(tensor, factors_of<float>(arguments, group, scale));
        }
    }
}

namespace {

void sgd_step(StableIValue* stack, uint64_t, uint64_t) {
    step_all(read_arguments(stack));
}

}  // namespace
}  // namespace esper::sgd

STABLE_TORCH_LIBRARY_IMPL(esper, CPU, m) {
    m.impl("sgd_step_", &esper::sgd::sgd_step);
}
