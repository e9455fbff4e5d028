"""Checks, before a run starts, that a task's loss and score return what training and growth need."""

from __future__ import annotations

import torch
from torch import Tensor

from esper.config import ConfigError
from esper.data.objective import PerSample, SampleObjective
from esper.data.task import Task

MAX_POINTS = 1000.0
"""Max absolute score of an untrained host in pp; a larger one is a score in another unit."""
TOLERANCE = 1e-3
"""Max relative difference of a sample's value in a batch and alone."""


def check_objective(task: Task, objective: SampleObjective, outputs: Tensor) -> None:
    """Tries loss and score on ``outputs`` [n, ...] of an untrained host for the first n validation samples.

    Raises:
        ConfigError: a function fails, does not return finite floating-point values of each sample, mixes samples, or
            returns scores of another unit than ``task.points`` says; or the loss cannot be differentiated.
    """
    y = task.validation.y[: len(outputs)]
    outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32)).requires_grad_()
    losses = _values(task, "loss", objective.loss, outputs, y)
    if not losses.requires_grad:
        raise ConfigError(f"{task.name}: the loss has no gradient; it must be differentiable in the outputs")
    with torch.no_grad():
        scores = _values(task, "score", objective.score, outputs.detach(), y)
    mean = float(scores.mean())
    points = mean * task.points
    if abs(points) > MAX_POINTS:
        raise ConfigError(
            f"{task.name}: the untrained host scores {mean:g}, which is {points:g} percentage points: set "
            "points so that scores span about 100 of them (100 for scores from 0 to 1, 1 for per cent), or normalise "
            "the targets"
        )


def _values(
    task: Task,
    what: str,
    function: PerSample,
    outputs: Tensor,
    y: Tensor,
) -> Tensor:
    """Returns the values [n] of samples. Raises ConfigError if they are not such values."""
    shapes = f"outputs {tuple(outputs.shape)} and targets {y.dtype} {tuple(y.shape)}"
    values = _call(task, what, function, outputs, y, shapes)
    rows = [slice(i, i + 1) for i in range(len(y))]
    alone = torch.cat([_call(task, what, function, outputs[row], y[row], shapes) for row in rows])
    largest = float(alone.detach().abs().max())
    if not torch.allclose(values, alone, rtol=TOLERANCE, atol=TOLERANCE * largest):
        raise ConfigError(
            f"{task.name}: the {what} of a sample changes with the other samples of its batch; for {shapes} it must "
            "return one value per sample. Are shapes broadcast, such as (n, 1) with (n,)?"
        )
    return values


def _call(
    task: Task,
    what: str,
    function: PerSample,
    outputs: Tensor,
    y: Tensor,
    shapes: str,
) -> Tensor:
    try:
        values = function(outputs, y)
    except Exception as error:  # a user's function may raise anything
        raise ConfigError(f"{task.name}: the {what} fails for {shapes}: {type(error).__name__}: {error}") from error
    right = f"one value per sample, a tensor of shape [{len(y)}] or [{len(y)}, ...]"
    if not isinstance(values, Tensor):
        raise ConfigError(f"{task.name}: the {what} returns {type(values).__name__}; it must return {right}")
    if values.dim() == 0 or len(values) != len(y):
        hint = "; torch's losses do with reduction='none'" if values.dim() == 0 else ""
        raise ConfigError(
            f"{task.name}: the {what} returns shape {tuple(values.shape)} for {shapes}; it must return {right}{hint}"
        )
    if values.is_complex() or (what == "loss" and not values.is_floating_point()):
        raise ConfigError(f"{task.name}: the {what} returns {values.dtype}; expected floating-point values")
    values = values.float()
    if values.dim() > 1:
        values = values.flatten(1).mean(dim=1)
    if not values.isfinite().all():
        raise ConfigError(f"{task.name}: the {what} of an untrained host is not finite, for {shapes}")
    return values
