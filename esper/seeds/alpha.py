"""The alpha controller: a scalar ramp that sets how much of a seed is blended in."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum


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


@dataclass
class AlphaController:
    """alpha = start + (target − start) · curve(done / steps); alpha holds once done = steps."""

    alpha: float = 0.0
    start: float = 0.0
    target: float = 0.0
    steps: int = 0
    done: int = 0
    curve: AlphaCurve = AlphaCurve.LINEAR
    velocity: float = 0.0
    """Change of alpha between the last two ticks, by the ramp or by a jump."""
    alpha_at_tick: float = 0.0

    @property
    def holding(self) -> bool:
        return self.done >= self.steps

    @property
    def lowering(self) -> bool:
        return not self.holding and self.target < self.start

    @property
    def progress(self) -> float:
        return 1.0 if self.holding else self.done / self.steps

    def retarget(self, target: float, steps: int, curve: AlphaCurve) -> None:
        """Starts a ramp from the current alpha to ``target`` in ``steps`` epochs; 0 steps jump.

        Raises ValueError while another ramp is running, or if ``target`` is outside [0, 1] or ``steps`` negative.
        """
        if not self.holding:
            raise ValueError(
                f"alpha is still moving to {self.target} ({self.done} of {self.steps} steps done): wait until it stops"
            )
        if not 0 <= target <= 1 or steps < 0:
            raise ValueError(f"expected a target in [0, 1] and steps >= 0, got target {target} and {steps} steps")
        self.start, self.target, self.steps, self.done, self.curve = self.alpha, target, steps, 0, curve
        if steps == 0:
            self.alpha = target

    def tick(self) -> None:
        """Ends an epoch: takes one step of the ramp and sets the velocity since the last tick."""
        self.advance()
        self.velocity = self.alpha - self.alpha_at_tick
        self.alpha_at_tick = self.alpha

    def advance(self) -> None:
        """Takes one step of the ramp; does nothing while alpha holds."""
        if not self.holding:
            self.done += 1
            low, high = sorted((self.start, self.target))
            value = self.start + (self.target - self.start) * self.curve.at(self.done / self.steps)
            # The last step sets the target exactly, so that rounding never leaves a seed at 0.9999999.
            self.alpha = self.target if self.holding else min(max(value, low), high)
