"""The no-growth baseline: the mean curve of the same host left alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

SMALLEST_STD = 1e-3


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
        return np.asarray(np.fmin(loss, max(self.loss)) / self.final_loss_std)

    def gain_by_loss(self, loss: Floats) -> Floats:
        """Returns by how much ``loss`` [...] is below the final loss, in the pp of accuracy that it was worth to hosts
        left alone: as their accuracy rose from its worst to its best, so their loss fell.

        Losses are clipped as in :meth:`in_stds`.
        """
        worth = np.ptp(self.accuracy) / max(float(np.ptp(self.loss)), SMALLEST_STD)
        return np.asarray((self.loss[-1] - np.fmin(loss, max(self.loss))) * worth)

    def check(self, horizon: int) -> None:
        """Raises ValueError when the curves are not those of an episode of ``horizon`` epochs."""
        if len(self.accuracy) != horizon + 1 or len(self.loss) != horizon + 1:
            raise ValueError(
                f"the baseline has {len(self.accuracy) - 1} epochs, the episode {horizon}: measure it again"
            )
