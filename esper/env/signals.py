"""What has been measured of one env so far in its episode: the history that observations read."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Measurement:
    """One epoch of one env after the governor; accuracies pp."""

    train_loss: float
    train_accuracy: float
    loss: float
    """Validation loss, everything on."""
    accuracy: float
    """Validation accuracy, everything on."""
    committed: float
    """Validation accuracy with fossils only."""
    all_off: float
    """Validation accuracy with every seed off, fossils too."""
    committed_loss: float
    """Validation loss with fossils only."""
    all_off_loss: float
    """Validation loss with every seed off, fossils too."""


class SignalTracker:
    """Histories of one episode, oldest first; index 0 is the untrained host."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.losses: list[float] = []
        self.accuracies: list[float] = []

    def record(self, measurement: Measurement) -> None:
        self.losses.append(measurement.loss)
        self.accuracies.append(measurement.accuracy)

    @property
    def best_accuracy(self) -> float:
        return max(self.accuracies, default=0.0)

    @property
    def epochs_since_best(self) -> int:
        """0 when the last epoch is the best so far; the first of equal bests counts."""
        return len(self.accuracies) - 1 - self.accuracies.index(self.best_accuracy) if self.accuracies else 0

    def risen(self, epochs: int) -> float:
        """What the best accuracy rose by in the last ``epochs`` epochs, pp; infinite in a shorter history."""
        earlier = self.accuracies[:-epochs]
        return self.best_accuracy - max(earlier) if earlier else math.inf

    def ago(self, values: list[float], epochs: int) -> float:
        """The value that many epochs before the last one; the first one where the history is shorter."""
        return values[max(0, len(values) - 1 - epochs)] if values else 0.0
