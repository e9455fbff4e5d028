"""Growth in a Lightning ``Trainer``, and loading of its checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from esper.config import ConfigError
from esper.core.blueprints import BLUEPRINTS, BlueprintRegistry
from esper.grower.grower import Grower
from esper.grower.merging import refuse_merges
from esper.grower.report import GrowthStep
from esper.hosts.container import CONTAINER
from esper.hosts.find import Sites
from esper.hosts.seed_state import add_seeds, has_recipes, take_seeds
from esper.hosts.widen import resize

AVERAGES = ("StochasticWeightAveraging", "WeightAveraging")
"""Callbacks that replace the module's weights by averages, which seeds have no part in."""

Module = TypeVar("Module", bound=LightningModule)
GROWN = "grown"
"""Key of checkpoints whose layers may be wider than the module's class makes them."""


def load_from_checkpoint(
    module_class: type[Module],
    path: Path | str,
    blueprints: BlueprintRegistry = BLUEPRINTS,
    **options: Any,
) -> Module:
    """Loads the module of a checkpoint with the seeds that were on when it was saved, growing ones included.

    ``options`` are those of ``module_class.load_from_checkpoint``. The widths of the layers and the seeds are those of
    the checkpoint. Raises ConfigError if it was saved without growth, or has a seed that ``blueprints`` does not have.
    """

    class Growing(module_class):  # type: ignore[valid-type,misc]
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            super().on_load_checkpoint(checkpoint)
            state = checkpoint["state_dict"]
            if GROWN not in checkpoint and not has_recipes(state):
                name = module_class.__name__
                raise ConfigError(f"nothing has grown in {path}: load it by {name}.load_from_checkpoint")
            _take(self, state, blueprints)

    module: Any = Growing.load_from_checkpoint(path, **options)
    module.__class__ = module_class
    loaded: Module = module
    return loaded


class GrowthCallback(Callback):
    """Grows a module while ``Trainer.fit`` trains it: a first decision before it trains, one after each validation.

    When ``fit`` ends, kept seeds become submodules of the module. Checkpoints hold the growth, and
    ``fit(ckpt_path=...)`` with a new module and the same arguments grows on to the same bits. A Trainer with this
    callback tests any of them, ``ckpt_path="best"`` included, with the seeds that were on then;
    :func:`load_from_checkpoint` loads them without a Trainer.

    Args:
        sites: paths of submodules, as in :func:`esper.graft`, in the LightningModule.
        score: maps the module and a validation batch to the scores of its samples, [n], higher is better.
        horizon: number of validations; None: ``max_epochs``, with one validation in each epoch.
        merge: whether kept seeds become a part of the layers when ``fit`` ends, where they can.
        start: whether the controller decides before the first epoch, too, see :meth:`Grower.start`.
        options: other arguments of :class:`Grower`, such as ``controller`` and ``topology``.

    ``growth/...`` are logged with the metrics of each validation, see :meth:`GrowthSummary.scalars`; loggers get them
    before the first epoch and after ``fit``, too.
    """

    def __init__(
        self,
        sites: Sites,
        score: Callable[..., Tensor],
        horizon: int | None = None,
        *,
        merge: bool = False,
        start: bool = True,
        **options: Any,
    ) -> None:
        self.sites = sites
        self.score = score
        self.horizon = horizon
        self.merge = merge
        self.start = start
        refuse_merges(options)
        self.options = options
        self.grower: Grower | None = None
        self.steps: list[GrowthStep] = []
        """The report of each decision since the start of ``fit``."""
        self._state: Mapping[str, Any] | None = None
        self._loading: Any = None  # the hook of the module while a stage runs

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Prepares the module for checkpoints with seeds: ``fit`` plants them itself, other stages load them.

        Raises ConfigError beside a callback that averages weights.
        """
        if stage == "fit":
            _require_no_averages(trainer)
        registry = self.options.get("blueprints") or BLUEPRINTS

        def arrive(module: Any, state: Any, *_more: Any) -> None:
            if stage == "fit":
                take_seeds(module, state, make=False)
            else:
                _take(module, state, registry)

        module: Any = pl_module  # torch gives the method no types
        self._loading = module.register_load_state_dict_pre_hook(arrive)

    def on_save_checkpoint(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        checkpoint: dict[str, Any],
    ) -> None:
        checkpoint[GROWN] = True
        add_seeds(pl_module, checkpoint["state_dict"])

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Makes the Grower. Raises ConfigError if it cannot work here."""
        if trainer.world_size > 1:
            raise ConfigError("growth in a Trainer works on one device: pass devices=1, or use esper.Grower with DDP")
        if len(trainer.optimizers) != 1 or not pl_module.automatic_optimization:
            raise ConfigError("growth in a Trainer needs one optimizer that the Trainer steps; or use esper.Grower")
        if not trainer.enable_validation:
            raise ConfigError("growth needs validation: give the module a validation_step and a loader for it")

        self.steps = []
        model: Any = trainer.strategy.model  # None before a fit
        self.grower = Grower(
            model,
            self.sites,
            trainer.optimizers[0],
            horizon=self.horizon or _validations(trainer),
            scheduler=[config.scheduler for config in trainer.lr_scheduler_configs],
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            merge=False,  # checkpoints load into a model of the first widths
            **self.options,
        )
        if self._state:  # before Lightning loads the optimizer, which has the seeds' groups
            self.grower.load_state_dict(self._state)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lets the controller decide before the first epoch, unless a checkpoint is resumed."""
        # With validation every few epochs and no sanity check, Lightning has made no loader yet.
        if self.grower is None or self._state or trainer.val_dataloaders is None or not self.start:
            return
        self.steps.append(self.grower.start(self._evaluation(trainer)))
        _log(trainer, self.grower.summary().scalars())

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        grower = self.grower
        if grower is None or grower.epoch >= grower.horizon:
            return
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        with torch.inference_mode(False):  # new seeds are trained
            self.steps.append(grower.step(self._evaluation(trainer)))
        pl_module.log_dict(grower.summary().scalars())

    def _evaluation(self, trainer: Trainer) -> Callable[[Any], Tensor]:
        """Returns the function that scores the module on the validation data, [n]."""
        loaders: Any = trainer.val_dataloaders
        if not isinstance(loaders, list | tuple):
            loaders = [loaders]

        def evaluate(module: Any) -> Tensor:
            module.eval()
            batches = map(trainer.strategy.batch_to_device, chain.from_iterable(loaders))
            with trainer.precision_plugin.val_step_context():
                scores = [self.score(module, batch) for batch in batches]
            return torch.cat(scores).float()

        return evaluate

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.grower is not None and self.grower.env is not None:
            self.grower.finish(self.merge)
            _log(trainer, self.grower.summary().scalars())

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._state = None
        if self._loading is not None:
            self._loading.remove()
            self._loading = None

    def state_dict(self) -> dict[str, Any]:
        if self.grower is None:
            return {}
        return self.grower.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._state = state_dict


def _take(module: nn.Module, state: dict[str, Any], blueprints: BlueprintRegistry) -> None:
    """Gives a module the widths and the seeds of a checkpoint's ``state``."""
    shapes = {}
    for name, value in state.items():
        if isinstance(value, Tensor) and CONTAINER not in name.split("."):
            shapes[name] = value.shape
    resize(module, shapes)  # first, because seeds are made for the widths of their layers
    take_seeds(module, state, make=True, blueprints=blueprints)


def _log(trainer: Trainer, scalars: dict[str, float]) -> None:
    """Gives the loggers ``scalars`` outside the epochs, where the module cannot log."""
    for logger in trainer.loggers:
        logger.log_metrics({"epoch": trainer.current_epoch, **scalars}, step=trainer.global_step)


def _require_no_averages(trainer: Any) -> None:
    for callback in trainer.callbacks:
        if {kind.__name__ for kind in type(callback).__mro__} & {*AVERAGES}:
            raise ConfigError(
                f"growth does not go with {type(callback).__name__}: the module would end with averaged weights beside "
                "seeds that fit the others. Average in a later fit, or in a custom loop with esper.Grower(averages=...)"
            )


def _validations(trainer: Trainer) -> int:
    """Returns the number of validations. Raises ConfigError unless there is one at the end of each epoch."""
    once_an_epoch = trainer.check_val_every_n_epoch == 1 and trainer.val_check_interval == 1.0
    epochs = int(trainer.max_epochs or 0)
    if not once_an_epoch or epochs <= 0:
        raise ConfigError("the number of validations is not known: pass horizon=, or max_epochs and one in each epoch")
    return epochs
