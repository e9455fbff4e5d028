"""Growth in a Lightning ``Trainer``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from esper.config import ConfigError
from esper.grower.grower import Grower
from esper.grower.report import GrowthStep


class GrowthCallback(Callback):
    """Grows a module while ``Trainer.fit`` trains it: one :meth:`Grower.step` after each validation.

    When ``fit`` ends, kept seeds become submodules of the module. Checkpoints hold the growth, and
    ``fit(ckpt_path=...)`` with a new module and the same arguments grows on to the same bits.

    Args:
        sites: slot name to the path of a submodule of the LightningModule.
        score: maps the module and a validation batch to the scores of its samples, [n], higher is better.
        horizon: number of validations; None: ``max_epochs``, with one validation in each epoch.
        options: other arguments of :class:`Grower`, such as ``controller`` and ``topology``.
    """

    def __init__(
        self, sites: Mapping[str, str], score: Callable[..., Tensor], horizon: int | None = None, **options: Any
    ) -> None:
        self.sites, self.score, self.horizon, self.options = sites, score, horizon, options
        self.grower: Grower | None = None
        self.steps: list[GrowthStep] = []
        """The report of each step since the start of ``fit``."""
        self._state: Mapping[str, Any] | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Makes the Grower. Raises ConfigError if it cannot work here."""
        if trainer.world_size > 1:
            raise ConfigError("growth in a Trainer works on one device: pass devices=1, or use esper.Grower with DDP")
        if len(trainer.optimizers) != 1 or not pl_module.automatic_optimization:
            raise ConfigError("growth in a Trainer needs one optimizer that the Trainer steps; or use esper.Grower")
        if not trainer.enable_validation:
            raise ConfigError("growth needs validation: give the module a validation_step and a loader for it")
        self.steps = []
        self.grower = Grower(
            trainer.strategy.model,
            self.sites,
            trainer.optimizers[0],
            horizon=self.horizon or _validations(trainer),
            scheduler=[each.scheduler for each in trainer.lr_scheduler_configs],
            **self.options,
        )
        if self._state:  # before Lightning loads the optimizer, which has the seeds' groups
            self.grower.load_state_dict(self._state)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self.grower is not None:  # Lightning clips all parameters of the optimizer next
            self.grower.groups.set_aside()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        grower = self.grower
        if grower is None or trainer.state.fn != "fit" or trainer.sanity_checking or grower.epoch >= grower.horizon:
            return
        loaders = trainer.val_dataloaders

        def evaluate(module: Any) -> Tensor:
            module.eval()
            batches = chain.from_iterable(loaders if isinstance(loaders, list | tuple) else [loaders])
            with trainer.precision_plugin.val_step_context():
                scores = [self.score(module, trainer.strategy.batch_to_device(batch)) for batch in batches]
            return torch.cat(scores).float()

        with torch.inference_mode(False):  # new seeds are trained
            self.steps.append(grower.step(evaluate))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.grower is not None and self.grower.env is not None:
            self.grower.finish()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._state = None

    def state_dict(self) -> dict[str, Any]:
        return {} if self.grower is None else self.grower.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._state = state_dict


def _validations(trainer: Trainer) -> int:
    """Returns the number of validations. Raises ConfigError unless there is one at the end of each epoch."""
    if (trainer.check_val_every_n_epoch, trainer.val_check_interval) != (1, 1.0) or (trainer.max_epochs or -1) < 0:
        raise ConfigError("the number of validations is not known: pass horizon=, or max_epochs and one in each epoch")
    return int(trainer.max_epochs or 0)
