"""The governor watches one host and rolls it back if it goes bad, before anything else reads it.

Losses are compared in units of chance, so that the same numbers fit every task: ln(classes), or the loss of the
untrained host.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from esper.config import Durations, GovernorConfig
from esper.training.snapshot import NOTHING, Restorable, Snapshot, ValidationRecord


@dataclass(frozen=True)
class Panic:
    """The reason of a rollback: the rule, the measured value and the threshold that it crossed."""

    reason: str
    value: float
    threshold: float


class Governor:
    """Checks every epoch, from the first; keeps two generations of healthy snapshots.

    Args:
        config: thresholds.
        durations: epochs between snapshots, and number of losses remembered.
        classes: number of classes of the task, with a loss of ln(classes) as chance; None if the loss is not
            cross-entropy: chance is then the size of an episode's first loss.
    """

    def __init__(
        self,
        config: GovernorConfig,
        durations: Durations,
        classes: int | None,
    ) -> None:
        self.config = config
        self.durations = durations
        self.classes = classes
        self._generations = [Snapshot(), Snapshot()]  # newest first
        self.reset()

    def reset(self) -> None:
        """Starts an episode; the memory of snapshots is kept."""
        self.chance = math.log(self.classes) if self.classes is not None else None
        """Loss of chance; None until it is measured."""
        self.losses: deque[float] = deque(maxlen=self.durations.governor_window)
        self.train_losses: deque[float] = deque(maxlen=self.durations.governor_window)
        """Mean training losses of recent epochs, anomalous ones included."""
        self.anomalies = 0
        """Number of consecutive anomalous checks."""
        self.rollbacks = 0
        self._rolled_back_at: int | None = None
        self._saved = 0

    def state_dict(self) -> dict[str, Any]:
        """Returns histories and snapshots of the episode, as plain values and CPU tensors."""
        return {
            "chance": self.chance,
            "losses": list(self.losses),
            "train_losses": list(self.train_losses),
            "anomalies": self.anomalies,
            "rollbacks": self.rollbacks,
            "rolled_back_at": self._rolled_back_at,
            "snapshots": [snapshot.state_dict() for snapshot in self._generations[: self._saved]],
        }

    def load_state_dict(
        self,
        state: dict[str, Any],
        device: torch.device,
    ) -> None:
        """Resumes from ``state``, for a host on ``device``."""
        self.reset()
        self.chance = state["chance"]
        self.losses.extend(state["losses"])
        self.train_losses.extend(state["train_losses"])
        self.anomalies = state["anomalies"]
        self.rollbacks = state["rollbacks"]
        self._rolled_back_at = state["rolled_back_at"]
        self._saved = len(state["snapshots"])
        # There may be fewer snapshots than generations.
        for snapshot, saved in zip(self._generations, state["snapshots"], strict=False):
            snapshot.load_state_dict(saved, device)

    def start_from(self, loss: float) -> None:
        """Restarts the history of losses with that of the untrained or restored host.

        Otherwise an explosion in the first epoch would become the normal loss, and a restored host, which has lost its
        living seeds, would be compared with its losses with them.
        """
        self.losses.clear()
        self.train_losses.clear()
        self.losses.append(loss)
        if self.chance is None:
            self.chance = max(abs(loss), 1e-6)

    @property
    def anomaly_pending(self) -> bool:
        return self.anomalies > 0

    def check(
        self,
        loss: float,
        not_finite: float,
        train_loss: float = math.nan,
    ) -> Panic | None:
        """Checks one epoch.

        Args:
            loss: its validation loss.
            not_finite: number of non-finite values in losses and in what makes up the committed network.
            train_loss: its mean training loss; NaN if it is not known. A host that trains better than in all recent
                epochs, or than chance without such epochs, does not diverge, whatever its validation loss is. That loss
                only stays out of the history: at high learning rates, the running statistics of batch normalisation,
                which only validation uses, lag behind the weights.
        """
        if not_finite > 0 or not math.isfinite(loss):
            return Panic(
                "not finite",
                not_finite if not_finite > 0 else loss,
                0.0,
            )
        if not self.losses or self.chance is None:
            self.losses.append(loss)
            return None

        mean = float(np.mean(self.losses))
        collapse = self.config.collapse_loss * self.chance
        if loss >= collapse and mean < self.config.healthy_loss * self.chance:
            return Panic("collapse", loss, collapse)

        threshold = self._divergence_threshold(mean, self.chance)
        high = loss > threshold
        improves = train_loss < min(self.train_losses, default=self.chance)
        self.train_losses.append(train_loss)
        if high and not improves:
            self.anomalies += 1
            if self.anomalies >= self.config.divergence_checks:
                return Panic("divergence", loss, threshold)
            return None

        self.anomalies = 0
        if not high:  # a high loss stays out of the history, whether it is an anomaly or not
            self.losses.append(loss)
        return None

    def _divergence_threshold(
        self,
        mean: float,
        chance: float,
    ) -> float:
        """The largest of mean + 6σ, 1.5 · mean and recent best + 0.25 · chance.

        :meth:`check` says when a loss above it is an anomaly.
        """
        config = self.config
        return max(
            mean + config.divergence_sigma * float(np.std(self.losses)),
            config.divergence_ratio * mean,
            min(self.losses) + config.divergence_margin * chance,
        )

    def snapshot_due(self, epoch: int, fossilized: bool) -> bool:
        """Returns whether the check found no anomaly, and a snapshot is due in ``epoch`` or a seed has just
        fossilized."""
        age = epoch - self._generations[0].epoch
        due = fossilized or self._saved == 0 or age >= self.durations.snapshot_every
        return due and not self.anomaly_pending

    def take_snapshot(
        self,
        training: Restorable,
        record: ValidationRecord,
        measured: Mapping[str, Mapping[str, float]],
        grown: Mapping[str, list[float]] = NOTHING,
    ) -> None:
        """Takes a snapshot with ``measured``, the measurements of each fossil, and what has ``grown``."""
        self._generations.reverse()  # the memory of the older one is filled again
        self._generations[0].save(training, record, measured, grown)
        self._saved = min(2, self._saved + 1)

    def rebase(
        self,
        training: Restorable,
        record: ValidationRecord,
        measured: Mapping[str, Mapping[str, float]],
        grown: Mapping[str, list[float]] = NOTHING,
    ) -> None:
        """Makes the present state that of both snapshots: the layers have grown, and do not go back."""
        for snapshot in self._generations:
            snapshot.save(training, record, measured, grown)
        self._saved = len(self._generations)

    def held(self) -> Counter[str]:
        """Returns the bytes of the snapshots by place: ``cpu``, ``cuda:0``, ..."""
        return self._generations[0].held() + self._generations[1].held()

    def roll_back(self, training: Restorable) -> Snapshot:
        """Restores the newest snapshot, or the older one if the last rollback is at most ``snapshot_every``
        epochs ago."""
        last = self._rolled_back_at
        recent = last is not None and training.epoch - last <= self.durations.snapshot_every
        if recent and self._saved == 2:
            # The state that was restored last led straight to this panic, so it is not trusted again.
            self._generations.reverse()
            self._saved = 1
        snapshot = self._generations[0]
        snapshot.restore(training)
        self.rollbacks += 1
        self._rolled_back_at = training.epoch
        self.anomalies = 0
        self.start_from(snapshot.record.loss)
        return snapshot
