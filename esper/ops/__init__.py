"""Compiled operators, one file each. Importing this loads them."""

from esper.ops.grad_stats import FIELDS, GradStats, grad_stats

__all__ = ["FIELDS", "GradStats", "grad_stats"]
