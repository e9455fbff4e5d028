// The parts of a training step as functions, for operators that run many steps in one call.
#pragma once

#include "../adamw_arguments.h"
#include "../cross_entropy.h"
#include "../grad_stats_arguments.h"
#include "../sgd_arguments.h"
#include "../stage_batch_arguments.h"

namespace esper {

namespace stage_batch {
// Writes the batch that `problem` selects into its output. Raises for an index outside of the dataset.
void stage(const Images& problem);
}  // namespace stage_batch

namespace cross_entropy {
// Measures float or double logits: adds the sums of all rows to `sums` [kFieldCount], writes whether each row is right
// to `correct` [N], and the gradient of the mean loss to `gradient` [N, C]; each may be null.
void measure(const Rows& rows, bool is_double, double* sums, uint8_t* correct, void* gradient);
}  // namespace cross_entropy

namespace grad_stats {
// Writes fields [G, kFieldCount] and norms [N].
void compute(const Arguments& arguments, double* fields, double* norms);
}  // namespace grad_stats

namespace sgd {
void step_all(const Arguments& arguments);
}  // namespace sgd

namespace adamw {
void step_all(const Arguments& arguments);
}  // namespace adamw

}  // namespace esper
