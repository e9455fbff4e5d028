"""Errors of loading a state, or weights, of the wrong form."""

from __future__ import annotations

MISFITS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
