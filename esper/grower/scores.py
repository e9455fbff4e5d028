"""Results of an ``evaluate`` function, read into one form."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

Evaluate = Callable[[nn.Module], Any]
"""Maps the model to a score (higher is better), to scores [n] of samples, or to ``(score or scores, mean loss)``."""

MAX_POINTS = 200.0
"""Max absolute score in pp; a larger one is a score in another unit."""
FORMS = "a number, the scores [n] of n >= 2 samples, or a tuple (score or scores, loss)"


@dataclass(frozen=True)
class Score:
    """One validation of one network."""

    samples: NDArray[np.float64]
    """Scores of the samples, [n]; of a single score, two equal ones, so that a paired difference has no error."""
    loss: float | None

    @property
    def mean(self) -> float:
        return float(self.samples.mean())

    def loss_at(self, points: float) -> float:
        """Returns the loss. Without one, what is missing to 100 pp counts, in units of one.

        ``points`` are the percentage points in one unit of the score.
        """
        if self.loss is not None:
            return self.loss
        return 1 - self.mean * points / 100


def read_score(result: object, epoch: int, finite: bool = True) -> Score:
    """Reads the result of ``evaluate`` after ``epoch`` epochs.

    Raises:
        TypeError: it has none of the forms that ``Evaluate`` describes.
        ValueError: a score is not finite; never if ``finite`` is False.
    """
    loss = None
    if isinstance(result, tuple):
        if len(result) != 2:
            raise TypeError(f"evaluate returned a tuple of {len(result)}; return {FORMS}")
        result, losses = result
        loss = float(_numbers(losses).mean())
    samples = _numbers(result)
    if samples.ndim > 1 or (samples.ndim == 1 and len(samples) < 2):
        raise TypeError(f"evaluate returned an array of shape {list(samples.shape)}; return {FORMS}")
    if finite and not np.isfinite(samples).all():
        raise ValueError(
            f"epoch {epoch}: evaluate returned a score that is not finite ({samples[~np.isfinite(samples)][0]}); "
            "the model has diverged, or the score is undefined for it"
        )
    return Score(samples if samples.ndim else np.repeat(samples, 2), loss)


def warning_of_unit(mean: float, points: float) -> str | None:
    """Returns what to say about a score that is far more than 100 percentage points, and None for any other.

    ``points`` are the percentage points in one unit of the score.
    """
    if not math.isfinite(mean) or abs(mean * points) <= MAX_POINTS:
        return None
    fitting = 10.0 ** math.floor(math.log10(100 / abs(mean)))
    return (
        f"evaluate returned {mean:g}, which is {mean * points:g} percentage points at points={points:g}. Gates and "
        f"controllers expect scores that span about 100 of them: if scores stay like this, pass points={fitting:g}; if "
        "this one is an exception, such as R² before training, nothing is to be done"
    )


def _numbers(value: object) -> NDArray[np.float64]:
    try:
        if isinstance(value, Tensor):
            value = value.detach().to("cpu", torch.float64).numpy()
        if value is not None:  # which NumPy reads as NaN
            return np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        pass
    raise TypeError(f"evaluate returned {type(value).__name__}; return {FORMS}")
