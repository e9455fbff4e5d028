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

FILE = "grower.pt"  # in each checkpoint


class GrowthTrainerCallback(TrainerCallback):
    """Grows a model while ``Trainer.train`` trains it: one :meth:`Grower.step` after each evaluation.

    When training ends, kept seeds become submodules of the model. Checkpoints hold the growth in ``grower.pt``, and
    ``train(resume_from_checkpoint=...)`` with a new model and the same arguments grows on to the same bits.

    Args:
        sites: paths of submodules, as in :func:`esper.graft`, in the model.
        score: maps the model and a batch of the evaluation data to the scores of its samples, [n], higher is better.
        horizon: number of evaluations; None: as many as the arguments of the Trainer plan.
        checkpoint: folder of the checkpoint that is resumed; None: that of the step in the output folder.
        merge: whether kept seeds become a part of the layers when training ends, where they can.
        options: other arguments of :class:`Grower`, such as ``controller`` and ``topology``.

    ``growth/...`` of each evaluation is in the ``log_history`` of the Trainer's state, see
    :meth:`GrowthSummary.scalars`; reporters that the Trainer calls after this callback get it with the next log.
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
        self._scalars: dict[str, float] = {}

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
        self._step = state.global_step
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

    def on_evaluate(self, args: Any, state: Any, control: Any, **has: Any) -> None:
        def evaluate(model: nn.Module) -> Tensor:
            model.eval()
            scores = [self.score(model, batch) for batch in has["eval_dataloader"]]
            return torch.cat(scores).float()

        grower = self.grower
        if grower is None or grower.epoch >= grower.horizon:
            return
        if state.global_step != self._step:
            self._step = state.global_step
            self.steps.append(grower.step(evaluate))
            self._log(state, grower.summary().scalars())

    def _log(self, state: Any, scalars: dict[str, float]) -> None:
        state.log_history.append({"epoch": state.epoch, "step": state.global_step, **scalars})
        self._scalars = scalars

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_has: Any) -> None:
        if logs is not None:
            logs.update(self._scalars)

    def on_save(self, args: Any, state: Any, control: Any, **_has: Any) -> None:
        if self.grower is None:
            return
        self._hook.remove()
        saved = {"grower": self.grower.state_dict(), "optimizer": self._optimizer.state_dict()}
        self._hook = self._optimizer.register_state_dict_post_hook(_without_seeds)
        torch.save(saved, f"{args.output_dir}/checkpoint-{state.global_step}/{FILE}")

    def on_train_end(self, args: Any, state: Any, control: Any, **_has: Any) -> None:
        if self.grower is not None:
            self._hook.remove()
            self.grower.finish(self.merge)
            self._log(state, self.grower.summary().scalars())


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
