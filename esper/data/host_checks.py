"""Checks on a few samples, before a run starts, that a task's hosts can be trained and grown."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from esper.config import ConfigError
from esper.core.place import Features
from esper.data.objective import PerSample, SampleObjective
from esper.data.split import SAMPLE, Split
from esper.data.task import Task
from esper.hosts.host import Host
from esper.hosts.inputs import form_of

TRAINABLE = (torch.float32, torch.bfloat16, torch.float64)
"""Parameter dtypes that the fused optimizer supports."""
MAX_POINTS = 1000.0
"""Max absolute score of an untrained host in pp; a larger one is a score in another unit."""
TOLERANCE = 1e-3
"""Max relative difference of a sample's value in a batch and alone."""


def check_hosts(
    task: Task,
    image_dtype: torch.dtype = torch.float32,
) -> None:
    """Makes two hosts of ``task``, and tries forward and backward passes on one of them.

    Images stored as bytes are converted to ``image_dtype``. The check uses torch's global generator; the caller seeds
    it and restores it.

    Raises:
        ConfigError: the result of ``build_host`` is not a host, its outputs have the wrong shape or do not suit the
            loss or the score, hosts share weights, or a network cannot be grown: it has no parameters or parameters of
            a dtype that cannot be trained, sparse gradients, activation checkpointing, or a site at which gradients are
            switched off.
    """
    x = task.validation.inputs(0, SAMPLE, image_dtype)
    host = task.new_host().to(task.device)
    _check_separate(task, host, task.new_host().to(task.device))
    if next(host.parameters(), None) is None:
        raise ConfigError(f"{task.name}: the host has no parameters")
    with _named_errors(task, x, "evaluation"):
        host.probe(x)
    _check_direction(task, host)
    for name, parameter in host.named_parameters():
        if parameter.requires_grad and parameter.dtype not in TRAINABLE:
            raise ConfigError(
                f"{task.name}: {name} is {parameter.dtype}; trainable parameters must be one of "
                f"{', '.join(map(str, TRAINABLE))}. For passes in float16, keep float32 and set task.precision"
            )

    # Both modes, since layers may differ in them.
    host.eval()
    outputs = _outputs(task, host, x)
    if isinstance(task.objective, SampleObjective):
        check_objective(task, task.objective, outputs)
    host.train()
    _outputs(task, host, x)
    _check_gradients(task, host, x)


def _check_separate(task: Task, host: Host, other: Host) -> None:
    storage = {tensor.data_ptr() for tensor in _tensors(other).values()}
    for name, tensor in _tensors(host).items():
        if tensor.data_ptr() in storage:
            raise ConfigError(
                f"{task.name}: two hosts share {name}: build_host must return a new network each time; to reuse "
                "an existing one, return copy.deepcopy of it"
            )


def _tensors(host: Host) -> dict[str, Tensor]:
    """Returns non-empty parameters and buffers by name; those of lazy layers are made in the first forward pass."""
    named = [*host.named_parameters(), *host.named_buffers()]
    return {name: tensor for name, tensor in named if not nn.parameter.is_lazy(tensor) and tensor.numel()}


def _check_direction(task: Task, host: Host) -> None:
    """Raises ConfigError if seeds would see the tokens that they are to predict."""
    if not isinstance(task.train, Split) or task.train.text is None:
        return
    for place in host.sites:
        if not place.has_source and (place.topology or host.topology) == "encoder":
            raise ConfigError(
                f"{task.name}: the targets are the next tokens, which seeds of an encoder would see; use the topology "
                "transformer"
            )


def _outputs(task: Task, host: Host, x: Tensor) -> Tensor:
    """Returns the outputs for inputs ``x``. Raises ConfigError if the network fails, or for logits of another shape."""
    y = task.validation.y[: len(x)]
    mode = "training" if host.training else "evaluation"
    with torch.no_grad(), _named_errors(task, x, mode):
        outputs = host(x)
    shape = (*y.shape, task.classes)
    if not isinstance(outputs, Tensor):
        wanted = f"[{len(y)}, ...]" if task.classes is None else f"logits {shape}"
        raise ConfigError(f"{task.name}: in {mode} the host returns {type(outputs).__name__}, not {wanted}")
    if task.classes is not None and outputs.shape != shape:
        raise ConfigError(
            f"{task.name}: in {mode} the host returns logits of shape {tuple(outputs.shape)} for {len(y)} samples; "
            f"expected {shape}"
        )
    return outputs


@contextmanager
def _named_errors(task: Task, x: Tensor, mode: str) -> Iterator[None]:
    """Turns an error in the network into a ConfigError that names the task and the shape of its inputs."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{task.name}: the host cannot run on inputs {form_of(x)}, in {mode}: {type(error).__name__}: {error}"
        ) from error


def _check_gradients(task: Task, host: Host, x: Tensor) -> None:
    """Runs a training step without an update and checks gradients at the sites and of the parameters."""
    off: list[str] = []

    def hook(site: int, at: Features) -> Tensor:
        if not torch.is_grad_enabled():
            off.append(host.sites[site].name)
        return at.h

    logits = host.forward_with_hook(x, hook)
    if off:
        raise ConfigError(
            f"{task.name}: gradients are switched off at slot {', '.join(off)} (torch.no_grad in the network); freeze "
            "layers with requires_grad_(False) instead"
        )
    if logits.requires_grad:

        def refuse(_module: nn.Module, _inputs: object) -> None:
            raise ConfigError(
                f"{task.name}: the network runs layers again in the backward pass (activation checkpointing), when "
                "slots and dropout would differ from the forward pass; switch it off"
            )

        with ExitStack() as hooks:
            for module in host.modules():
                hooks.callback(module.register_forward_pre_hook(refuse).remove)
            logits.float().sum().backward()  # type: ignore[no-untyped-call]
    for name, parameter in host.named_parameters():
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise ConfigError(f"{task.name}: the gradient of {name} is sparse; make its layer with sparse=False")
    host.zero_grad(set_to_none=True)


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
