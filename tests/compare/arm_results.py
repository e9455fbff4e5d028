"""Arms compared with a reference in test accuracy."""

from __future__ import annotations

import numpy as np

from esper.compare.analysis import ArmComparison, corrected
from esper.compare.comparison import ArmResult


def against(reference: ArmResult, *others: ArmResult) -> list[ArmComparison]:
    return corrected([other.against(reference) for other in others])


def arm(name: str, *accuracies: float) -> ArmResult:
    values = np.array(accuracies)
    return ArmResult(name, values, np.full(len(values), 277.0), np.zeros(len(values)))
