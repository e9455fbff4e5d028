"""The measurements of one env in its episode so far, whose history observations read."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Measurement:
    """Measurements of one env in one epoch, after the governor; accuracies in pp."""

    train_loss: float
    train_accuracy: float
    loss: float
    """Validation loss with everything on."""
    accuracy: float
    """Validation accuracy with everything on."""
    committed: float
    """Validation accuracy with fossils only."""
    all_off: float
    """Validation accuracy with every seed off, including fossils."""
    committed_loss: float
    """Validation loss with fossils only."""
    all_off_loss: float
    """Validation loss with every seed off, including fossils."""


class ValidationHistory:
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
        """Epochs since the best accuracy, the first of equal ones; 0 if the last epoch is the best so far."""
        return len(self.accuracies) - 1 - self.accuracies.index(self.best_accuracy) if self.accuracies else 0

    def risen(self, epochs: int) -> float:
        """Returns the rise of the best accuracy in the last ``epochs`` epochs, pp; infinite for a shorter history."""
        earlier = self.accuracies[:-epochs]
        return self.best_accuracy - max(earlier) if earlier else math.inf

    def ago(self, values: list[float], epochs: int) -> float:
        """Returns the value ``epochs`` before the last one, or the first one if the history is shorter; 0 if empty."""
        return values[max(0, len(values) - 1 - epochs)] if values else 0.0
