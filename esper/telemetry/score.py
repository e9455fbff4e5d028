"""The name and the unit in which a score is shown. Everywhere else a score is in percentage points (pp)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from esper.telemetry.text import labelled, number, with_unit


@dataclass(frozen=True)
class ScoreUnit:
    """Display format of a score; accuracy in per cent unless stated otherwise."""

    name: str = "accuracy"
    unit: str = "%"
    """Unit of the score; empty for none."""
    gap: str = "pp"
    """Unit of differences of scores."""
    points: float = 1.0
    """Percentage points in one unit."""
    priced: bool = False
    """Whether it is accuracy minus the price of what was grown; the price is taken off test accuracies only."""
    of_reward: float = 0.0
    """Percentage points that a reward of 1 stands for; 0 if rewards are plain numbers."""

    @property
    def while_training(self) -> ScoreUnit:
        """Display format of training and validation scores, from which no price is taken off."""
        return ACCURACY if self.priced else self

    def rewards(self, total: float, digits: int = 2) -> str:
        """Formats a sum of rewards: in the unit of the score, or with a decimal more where they are plain numbers."""
        if not self.of_reward:
            return number(total, digits + 1, sign=True)
        return self.difference(self.of_reward * total, digits)

    @property
    def decimals(self) -> int:
        """Decimals of a score that show as much as none do in percentage points."""
        return max(0, round(math.log10(self.points)))

    def of(self, points: float) -> float:
        """Returns a score or a difference, given in percentage points, in its unit."""
        return points / self.points

    def value(self, points: float | None, digits: int = 2, unit: bool = True) -> str:
        """Formats a score given in percentage points, with as many ``digits`` as would be shown of those."""
        return self._format(points, digits, self.unit if unit else "", sign=False)

    def difference(self, points: float | None, digits: int = 2, unit: bool = True) -> str:
        """Formats a difference of scores with its sign, as :meth:`value` does."""
        return self._format(points, digits, self.gap if unit else "", sign=True)

    def _format(self, points: float | None, digits: int, unit: str, sign: bool) -> str:
        if points is None or not abs(points) < 1e9:  # in words
            return number(points, digits, unit, sign)
        form = "+z" if sign else "z"  # z: a difference that rounds to zero has no minus
        decimals = digits + self.decimals
        return with_unit(f"{self.of(points):{form},.{decimals}f}", unit)

    def label(self, words: str) -> str:
        """Returns ``words`` with the unit of the score, for an axis or a column."""
        return labelled(words, self.unit)

    def gap_label(self, words: str) -> str:
        """Returns ``words`` with the unit of differences."""
        return labelled(words, self.gap)


ACCURACY = ScoreUnit()
