"""How seeds are blended in: the curves by which alpha moves, and the styles that choose one.

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

        def sigmoid(u: float) -> float:
            return 1 / (1 + math.exp(-steepness * (u - 0.5)))

        return (sigmoid(t) - sigmoid(0.0)) / (sigmoid(1.0) - sigmoid(0.0))


class BlendOperator(Enum):
    ADD = "add"
    """d = f(h)"""
    MULTIPLY = "multiply"
    """d = h · tanh(f(h))"""
    GATE = "gate"
    """d = g(h) · f(h), with g in (0, 1) per sample, and per position in a sequence"""


@dataclass(frozen=True)
class BlendStyle:
    """The controller's choice at germination: an operator and the curve of the first ramp."""

    operator: BlendOperator
    curve: AlphaCurve


STYLES: Mapping[str, BlendStyle] = MappingProxyType(
    {
        "LINEAR_ADD": BlendStyle(BlendOperator.ADD, AlphaCurve.LINEAR),
        "LINEAR_MULTIPLY": BlendStyle(BlendOperator.MULTIPLY, AlphaCurve.LINEAR),
        "SIGMOID_ADD": BlendStyle(BlendOperator.ADD, AlphaCurve.LOGISTIC_12),
        "GATED_GATE": BlendStyle(BlendOperator.GATE, AlphaCurve.LINEAR),
    }
)

# Tables by the indices of actions.
_CURVES = [AlphaCurve(name) for name in action.ALPHA_CURVES]
_STYLES = [STYLES[name] for name in action.STYLES]
STYLE_CURVE: NDArray[np.int64] = np.array([_CURVES.index(style.curve) for style in _STYLES])
"""Curve of the first ramp, by style."""
STYLE_OPERATOR: NDArray[np.int64] = np.array([list(BlendOperator).index(style.operator) for style in _STYLES])
STYLE_IS_GATED: NDArray[np.bool_] = np.array([style.operator is BlendOperator.GATE for style in _STYLES])

MAX_STEPS = max(*action.TEMPOS, *action.ALPHA_SPEEDS)


def _progress() -> NDArray[np.float64]:
    table = np.zeros((len(_CURVES), MAX_STEPS + 1, MAX_STEPS + 1))
    for c, curve in enumerate(_CURVES):
        for steps in range(1, MAX_STEPS + 1):
            for done in range(steps + 1):
                table[c, steps, done] = curve.at(done / steps)
    return table


PROGRESS = _progress()
"""Progress of ramps, [curves, steps, done]."""
