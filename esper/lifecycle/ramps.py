"""Ramps that blend seeds in: the curves by which alpha moves, and the styles that choose one.

A ramp goes from ``start`` to ``target``: alpha = start + (target − start) · curve(done / steps); alpha holds once
done = steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from esper.spaces import action


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
        steepness = float(self.value.removeprefix("logistic_"))
        first, now, last = (1 / (1 + math.exp(-steepness * (u - 0.5))) for u in (0.0, t, 1.0))
        return (now - first) / (last - first)


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


STYLES: Mapping[str, BlendStyle] = MappingProxyType(
    {
        style.name: style
        for style in (
            BlendStyle("LINEAR_ADD", BlendOperator.ADD, AlphaCurve.LINEAR),
            BlendStyle("LINEAR_MULTIPLY", BlendOperator.MULTIPLY, AlphaCurve.LINEAR),
            BlendStyle("SIGMOID_ADD", BlendOperator.ADD, AlphaCurve.LOGISTIC_12),
            BlendStyle("GATED_GATE", BlendOperator.GATE, AlphaCurve.LINEAR),
        )
    }
)

# Tables by the indices of actions.
_CURVES = [AlphaCurve(name) for name in action.ALPHA_CURVES]
_STYLES = [STYLES[name] for name in action.STYLES]
STYLE_CURVE: NDArray[np.int64] = np.array([_CURVES.index(style.curve) for style in _STYLES])
"""Curve of the first ramp, by style."""
STYLE_ADDED: NDArray[np.int64] = np.array(
    [
        next(
            number
            for number, other in enumerate(_STYLES)
            if (other.operator, other.curve) == (BlendOperator.ADD, style.curve)
        )
        for style in _STYLES
    ]
)
"""The style with the operator ADD and the same curve, by style."""
STYLE_OPERATOR: NDArray[np.int64] = np.array([list(BlendOperator).index(style.operator) for style in _STYLES])
STYLE_IS_GATED: NDArray[np.bool_] = np.array([style.operator is BlendOperator.GATE for style in _STYLES])

MAX_STEPS = max(*action.TEMPOS, *action.ALPHA_SPEEDS)
PROGRESS: NDArray[np.float64] = np.zeros((len(_CURVES), MAX_STEPS + 1, MAX_STEPS + 1))
"""Progress of ramps, [curves, steps, done]."""
for _c, _steps in np.ndindex(len(_CURVES), MAX_STEPS + 1):
    for _done in range(_steps + 1 if _steps else 0):
        PROGRESS[_c, _steps, _done] = _CURVES[_c].at(_done / _steps)
