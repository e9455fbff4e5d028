"""Compiled operators, one file each. Importing this loads them."""

from esper.ops.grad_stats import FIELDS, GradStats, grad_stats
from esper.ops.norm_relu_pool import NormReluPool, norm_relu_pool

__all__ = ["FIELDS", "GradStats", "NormReluPool", "grad_stats", "norm_relu_pool"]
