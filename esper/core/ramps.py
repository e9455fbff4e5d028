"""Ramps that blend seeds in: the curves by which alpha moves, and the styles that choose one.

A ramp goes from ``start`` to ``target``: alpha = start + (target − start) · curve(done / steps); alpha holds once
done = steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np

from esper.core import action
from esper.core.arrays import Bools, Floats, Ints


class AlphaCurve(Enum):
    LINEAR = "linear"
    COSINE = "cosine"
    LOGISTIC_6 = "logistic_6"
    LOGISTIC_12 = "logistic_12"
    LOGISTIC_24 = "logistic_24"

    def at(self, t: float) -> float:
        """Returns the progress in [0, 1] at time ``t`` in [0, 1]; every curve runs from exactly 0 to exactly 1."""
        if self is AlphaCurve.LINEAR:
            return t
        if self is AlphaCurve.COSINE:
            return (1 - math.cos(math.pi * t)) / 2
        # A logistic function comes near 0 and 1 only, so it is stretched over the whole range.
        steepness = float(self.value.removeprefix("logistic_"))
        first = _logistic(0.0, steepness)
        last = _logistic(1.0, steepness)
        return (_logistic(t, steepness) - first) / (last - first)


def _logistic(t: float, steepness: float) -> float:
    return 1 / (1 + math.exp(-steepness * (t - 0.5)))


class BlendOperator(Enum):
    ADD = "add"
    """d = f(h)"""
    MULTIPLY = "multiply"
    """d = h · tanh(f(h))"""
    GATE = "gate"
    """d = g(h) · f(h), with g in (0, 1) per sample, and per position in a causal sequence"""


@dataclass(frozen=True)
class BlendStyle:
    """The controller's choice at germination: an operator and the curve of the first ramp."""

    name: str
    operator: BlendOperator
    curve: AlphaCurve


_BLEND_STYLES = (
    BlendStyle("LINEAR_ADD", BlendOperator.ADD, AlphaCurve.LINEAR),
    BlendStyle("LINEAR_MULTIPLY", BlendOperator.MULTIPLY, AlphaCurve.LINEAR),
    BlendStyle("SIGMOID_ADD", BlendOperator.ADD, AlphaCurve.LOGISTIC_12),
    BlendStyle("GATED_GATE", BlendOperator.GATE, AlphaCurve.LINEAR),
)
STYLES: Mapping[str, BlendStyle] = {style.name: style for style in _BLEND_STYLES}

# Tables by the indices of actions.
_CURVES = [AlphaCurve(name) for name in action.ALPHA_CURVES]
_STYLES = [STYLES[name] for name in action.STYLES]
STYLE_CURVE: Ints = np.array([_CURVES.index(style.curve) for style in _STYLES])
"""Curve of the first ramp, by style."""
_ADDS = {style.curve: number for number, style in enumerate(_STYLES) if style.operator is BlendOperator.ADD}
STYLE_ADDED: Ints = np.array([_ADDS[style.curve] for style in _STYLES])
"""The style with the operator ADD and the same curve, by style."""
_OPERATORS = list(BlendOperator)
STYLE_OPERATOR: Ints = np.array([_OPERATORS.index(style.operator) for style in _STYLES])
STYLE_IS_GATED: Bools = np.array([style.operator is BlendOperator.GATE for style in _STYLES])

MAX_STEPS = max(*action.TEMPOS, *action.ALPHA_SPEEDS)
PROGRESS: Floats = np.zeros((len(_CURVES), MAX_STEPS + 1, MAX_STEPS + 1))
"""Progress of ramps, [curves, steps, done]."""
for _number, _curve in enumerate(_CURVES):
    for _steps in range(1, MAX_STEPS + 1):  # a ramp without steps jumps, and has no progress
        for _done in range(_steps + 1):
            PROGRESS[_number, _steps, _done] = _curve.at(_done / _steps)
