"""Growth in the ``Trainer`` of transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from esper.config import ConfigError
from esper.grower.grower import Grower
from esper.grower.merging import refuse_merges
from esper.grower.report import GrowthStep
from esper.grower.stepping import unwrapped
from esper.hosts.find import Sites
from esper.hosts.seed_state import add_seeds
from esper.integrations.pretrained import FILE, note_growing


class GrowthTrainerCallback(TrainerCallback):
    """Grows a model while ``Trainer.train`` trains it: one :meth:`Grower.step` after each evaluation.

    With ``eval_on_start=True`` the controller decides before the first epoch, too, which is better for models that are
    not trained. When training ends, kept seeds become submodules of the model. Checkpoints hold the growth in
    ``grower.pt``, and ``train(resume_from_checkpoint=...)`` with a new model and the same arguments grows on to the
    same bits. :func:`esper.integrations.pretrained.from_pretrained` loads a checkpoint with the seeds that were on.

    Args:
        sites: paths of submodules, as in :func:`esper.graft`, in the model.
        score: maps the model and a batch of the evaluation data to the scores of its samples, [n], higher is better.
        horizon: number of evaluations; None: as many as the arguments of the Trainer plan.
        checkpoint: folder of the checkpoint that is resumed; None: that of the step in the output folder.
        merge: whether kept seeds become a part of the layers when training ends, where they can.
        options: other arguments of :class:`Grower`, such as ``controller`` and ``topology``.

    ``growth/...`` are logged with the metrics of each evaluation, see :meth:`GrowthSummary.scalars`, for reporters that
    the Trainer calls after this callback; the ``log_history`` of its state has them after training, too.
    """

    def __init__(
        self,
        sites: Sites,
        score: Callable[..., Tensor],
        horizon: int | None = None,
        checkpoint: Path | str | None = None,
        *,
        merge: bool = False,
        **options: Any,
    ) -> None:
        self.sites = sites
        self.score = score
        self.horizon = horizon
        self.checkpoint = checkpoint
        self.merge = merge
        refuse_merges(options)
        self.options = options
        self.grower: Grower | None = None
        self.steps: list[GrowthStep] = []  # since the start of training

    def on_train_begin(self, args: Any, state: Any, control: Any, **has: Any) -> None:
        """Makes the Grower. Raises ConfigError if it cannot work here, or the checkpoint lacks the growth."""
        sharded = args.world_size > 1 or args.n_gpu > 1 or args.deepspeed or args.fsdp
        # The best model's old weights would be loaded beside new seeds.
        if sharded or args.torch_compile or args.load_best_model_at_end:
            unfit = "several devices, DeepSpeed, FSDP, torch_compile and load_best_model_at_end"
            raise ConfigError(f"growth in a Trainer does not work with {unfit}; esper.Grower works with DDP")
        self.grower = Grower(
            has["model"],
            self.sites,
            has["optimizer"],
            horizon=self.horizon or _evaluations(args, state),
            scheduler=has["lr_scheduler"],
            scaler=getattr(has["optimizer"], "scaler", None),  # that of accelerate
            merge=False,  # checkpoints load into a model of the first widths
            **self.options,
        )
        self.steps = []
        self._step = state.global_step if state.global_step else -1  # of the last decision
        self._optimizer = unwrapped(has["optimizer"])
        if state.global_step:
            folder = self.checkpoint or f"{args.output_dir}/checkpoint-{state.global_step}"
            file = Path(folder) / FILE
            if not file.is_file():
                raise ConfigError(f"{file} does not exist: pass the folder of the checkpoint as checkpoint=")
            saved = torch.load(file, map_location=args.device)
            self.grower.load_state_dict(saved["grower"])
            self._optimizer.load_state_dict(saved["optimizer"])
        # The Trainer loads the optimizer before there is a Grower, so it may only save the host's part of it.
        self._hook = self._optimizer.register_state_dict_post_hook(_without_seeds)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **has: Any) -> None:
        """Grows when the metrics of an evaluation are logged, so that they are logged with those of growth."""
        if logs and any(name.startswith("eval_") for name in logs):
            scalars = self._grow(state, has["eval_dataloader"])
            logs.update(scalars)
            state.log_history[-1].update(scalars)

    def on_evaluate(self, args: Any, state: Any, control: Any, **has: Any) -> None:
        """Grows after an evaluation that has logged nothing."""
        if scalars := self._grow(state, has["eval_dataloader"]):
            _add_row(state, scalars)

    def _grow(self, state: Any, batches: Any) -> dict[str, float]:
        """Lets the controller decide, once at a step of the Trainer; returns the numbers of growth if it has."""

        def evaluate(model: nn.Module) -> Tensor:
            model.eval()
            scores = [self.score(model, batch) for batch in batches]
            return torch.cat(scores).float()

        grower = self.grower
        if grower is None or grower.epoch >= grower.horizon or state.global_step == self._step:
            return {}
        self._step = state.global_step
        if state.global_step:
            self.steps.append(grower.step(evaluate))
        else:
            self.steps.append(grower.start(evaluate))
        return grower.summary().scalars()

    def on_save(self, args: Any, state: Any, control: Any, **_has: Any) -> None:
        if self.grower is None:
            return
        self._hook.remove()
        saved = {"grower": self.grower.state_dict(), "optimizer": self._optimizer.state_dict()}
        self._hook = self._optimizer.register_state_dict_post_hook(_without_seeds)
        seeds: dict[str, Tensor] = {}
        add_seeds(self.grower.model, seeds)
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        torch.save({**saved, "seeds": seeds}, folder / FILE)
        if len(seeds) > 1:  # one entry says that there may be seeds
            note_growing(folder)

    def on_train_end(self, args: Any, state: Any, control: Any, **_has: Any) -> None:
        if self.grower is not None:
            self._hook.remove()
            self.grower.finish(self.merge)
            _add_row(state, self.grower.summary().scalars())


def _add_row(state: Any, scalars: dict[str, float]) -> None:
    state.log_history.append({"epoch": state.epoch, "step": state.global_step, **scalars})


def _without_seeds(_optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
    groups = [group for group in state["param_groups"] if "slot" not in group]
    kept: set[int] = set()
    for group in groups:
        kept.update(group["params"])
    values = {index: value for index, value in state["state"].items() if index in kept}
    return {"param_groups": groups, "state": values}


def _evaluations(args: Any, state: Any) -> int:
    """Returns the planned number of evaluations."""
    if args.eval_strategy == "epoch":
        return int(state.num_train_epochs)
    if args.eval_strategy == "steps" and state.eval_steps:
        return int(state.max_steps // state.eval_steps)
    raise ConfigError("growth steps after each evaluation: set eval_strategy to epoch or steps, and eval_dataset")
