"""The no-growth baseline: the mean curve of the same host left alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from esper.lifecycle.slots import Floats

MIN_STD = 1e-3


@dataclass(frozen=True)
class Baseline:
    """Curves by epochs done, 0 to T; accuracy is pp on the validation split."""

    accuracy: tuple[float, ...]
    loss: tuple[float, ...]
    final_loss_std: float
    """Standard deviation over hosts of the last loss, at least 1e-3."""
    episodes: int

    def in_stds(self, loss: Floats) -> Floats:
        """Losses [...] in standard deviations of the final loss.

        Losses are clipped at the baseline's worst one, that of the untrained host; non-finite ones count as that, which
        keeps rewards finite.
        """
        return np.asarray(self._clipped(loss) / self.final_loss_std)

    def gain_by_loss(self, loss: Floats) -> Floats:
        """Returns the gain in accuracy that ``loss`` [...] stands for, pp: its distance below the final loss, times the
        range of the accuracies over that of the losses of hosts left alone; 0 if their loss never moved.

        Losses are clipped as in :meth:`in_stds`.
        """
        moved = float(np.ptp(self.loss))
        worth = 0.0
        if moved > 0:
            worth = float(np.ptp(self.accuracy)) / moved
        below = self.loss[-1] - self._clipped(loss)
        return np.asarray(below * worth)

    def _clipped(self, loss: Floats) -> Floats:
        # Of a number and NaN, fmin takes the number.
        return np.fmin(loss, max(self.loss))

    def check(self, horizon: int) -> None:
        """Raises ValueError when the curves are not those of an episode of ``horizon`` epochs."""
        points = horizon + 1
        if len(self.accuracy) != points or len(self.loss) != points:
            raise ValueError(
                f"the baseline has {len(self.accuracy) - 1} epochs, the episode {horizon}: measure it again"
            )
