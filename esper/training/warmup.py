"""The learning rates of a host and of its seeds in each step, computed on the device."""

from __future__ import annotations

import torch

from esper.config import HostTrainingConfig


class WarmUp:
    """Sets a learning rate: that of the epoch's schedule times ``min(1, step / steps)``, with steps counted from 1.

    The count is on the device, because a captured step is launched without Python. It follows from the epoch, so that
    there is nothing to save, and a rollback, which does not rewind clocks, does not warm up again.

    Args:
        config: the length of epochs, and the optimizer.
        epochs: number of epochs over which the rate rises.
        device: of the rate.
    """

    def __init__(self, config: HostTrainingConfig, epochs: float, device: torch.device) -> None:
        dtype = torch.float32 if config.task.optimizer == "adamw" else torch.float64
        self.rate = torch.zeros((), dtype=dtype, device=device)
        """The scalar that optimizers read, float64, or float32 for AdamW; filled in place."""
        self.epoch_steps = config.task.samples_per_epoch // config.task.batch_size
        self.steps = round(epochs * self.epoch_steps)
        self.factor = 0.0
        """The rate of the epoch's schedule."""
        self.done = 0
        """Steps done before the epoch."""
        self._scheduled = torch.zeros_like(self.rate) if self.steps else self.rate
        self._done = torch.zeros_like(self.rate)  # steps

    def start_epoch(self, scheduled: float, epochs: int) -> None:
        """Starts an epoch at the rate of its schedule; ``epochs`` is the number of epochs done."""
        self.factor = scheduled
        self.done = epochs * self.epoch_steps
        self._scheduled.fill_(scheduled)
        if self.steps:
            self._done.fill_(self.done)

    def step(self) -> None:
        """Sets the rate of the step that follows."""
        if self.steps:
            self._done.add_(1)
            share = (self._done / self.steps).clamp(max=1)
            torch.mul(self._scheduled, share, out=self.rate)


class SeedRate(WarmUp):
    """The learning rate of the seed at one site: ``task.seed_rate`` times the host's, times ``min(1, step / steps)``.

    The steps are those since the seed was planted.

    Args:
        host: the host's rate; steps are counted after it has been set.
    """

    def __init__(self, config: HostTrainingConfig, host: WarmUp) -> None:
        super().__init__(config, config.task.seed_warmup_epochs, host.rate.device)
        self.share = config.task.seed_rate
        """The seed's rate as a fraction of the host's."""
        self._host = host.rate

    def rises(self, epochs: int) -> bool:
        """Whether it still rises after ``epochs`` whole epochs of the seed."""
        return epochs * self.epoch_steps < self.steps

    def start_epoch(self, scheduled: float, epochs: int) -> None:
        """Starts an epoch; ``epochs`` is the number of epochs since the seed was planted."""
        super().start_epoch(scheduled, epochs)
        self.factor = self.share

    def step(self) -> None:
        torch.mul(self._host, self.share, out=self._scheduled)
        super().step()
