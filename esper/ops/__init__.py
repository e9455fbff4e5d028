"""Compiled operators, one file each. Importing this loads them."""

from esper.ops.grad_stats import FIELDS, GradStats, grad_stats
from esper.ops.norm_relu_pool import NormReluPool, norm_relu_pool
from esper.ops.sgd import SGD, sgd_step

__all__ = ["FIELDS", "SGD", "GradStats", "NormReluPool", "grad_stats", "norm_relu_pool", "sgd_step"]
