"""The learning rates of a host and of its seeds in each step, computed on the device."""

from __future__ import annotations

import torch

from esper.config.resolved import HostTrainingConfig


class WarmUp:
    """Sets the learning rate: that of the epoch's schedule times ``min(1, step / steps)``, with steps counted from 1.

    The count is on the device, because a captured step is launched without Python. It follows from the epoch, so that
    there is nothing to save, and a rollback, which does not rewind clocks, does not warm up again.

    Args:
        config: the number of epochs, their length, and the optimizer.
        device: of the rate.
    """

    def __init__(self, config: HostTrainingConfig, device: torch.device) -> None:
        dtype = torch.float32 if config.task.optimizer == "adamw" else torch.float64
        self.rate = torch.zeros((), dtype=dtype, device=device)
        """The scalar that optimizers read, float64, or float32 for AdamW; filled in place."""
        self.epoch_steps = config.task.samples_per_epoch // config.task.batch_size
        self.steps = round(config.task.warmup_epochs * self.epoch_steps)
        self._scheduled = torch.zeros_like(self.rate)
        self._done = torch.zeros_like(self.rate)  # steps

    def start_epoch(self, scheduled: float, epoch: int) -> None:
        """Starts an epoch at the rate of its schedule; ``epoch`` is the number of epochs done."""
        self.rate.fill_(scheduled)
        if self.steps:
            self._scheduled.fill_(scheduled)
            self._done.fill_(epoch * self.epoch_steps)

    def step(self) -> None:
        """Sets the rate of the step that follows."""
        if self.steps:
            self._done.add_(1)
            share = (self._done / self.steps).clamp(max=1)
            torch.mul(self._scheduled, share, out=self.rate)


class SeedRate:
    """The learning rate of the seed at one site: ``task.seed_rate`` times the host's, times ``min(1, step / steps)``.

    The steps are those since the seed was planted, counted from 1, over which its rate rises.

    Args:
        host: the host's rate; steps are counted after it has been set.
    """

    def __init__(self, config: HostTrainingConfig, host: WarmUp) -> None:
        self.factor = config.task.seed_rate
        self.rate = torch.zeros_like(host.rate)
        """The scalar that the seed's optimizer reads; filled in place."""
        self.epoch_steps = host.epoch_steps
        self.steps = round(config.task.seed_warmup_epochs * self.epoch_steps)
        self._host = host.rate
        self._done = torch.zeros_like(host.rate)  # steps since the seed was planted

    def start_epoch(self, epochs: int) -> None:
        """Starts an epoch, ``epochs`` after the seed was planted."""
        if self.steps:
            self._done.fill_(epochs * self.epoch_steps)

    def step(self) -> None:
        """Sets the rate of the step that follows."""
        torch.mul(self._host, self.factor, out=self.rate)
        if self.steps:
            self._done.add_(1)
            self.rate.mul_((self._done / self.steps).clamp(max=1))
