"""Compiled operators, one per file. Importing this package loads them."""

from esper.ops.accumulators import ACCUMULATOR_FIELDS, Accumulators, accumulate_
from esper.ops.adamw import AdamW, adamw_step
from esper.ops.cross_entropy import CrossEntropy, cross_entropy, cross_entropy_into
from esper.ops.grad_stats import FIELDS, GradStats, grad_stats
from esper.ops.norm_relu_pool import NormReluPool, norm_relu_pool
from esper.ops.sgd import SGD, sgd_step
from esper.ops.stage_batch import normalisation_table, stage_images, stage_tokens

__all__ = [
    "ACCUMULATOR_FIELDS",
    "FIELDS",
    "SGD",
    "Accumulators",
    "AdamW",
    "CrossEntropy",
    "GradStats",
    "NormReluPool",
    "accumulate_",
    "adamw_step",
    "cross_entropy",
    "cross_entropy_into",
    "grad_stats",
    "norm_relu_pool",
    "normalisation_table",
    "sgd_step",
    "stage_images",
    "stage_tokens",
]
