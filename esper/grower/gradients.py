"""Gradients of a user's model: their statistics, averages over ranks, and a stash for those its loop must not see."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from esper.config import ConfigError, TaskConfig
from esper.hosts.layout import is_compiled
from esper.ops.grad_stats import FIELDS, GradStats, grad_stats
from esper.training.metrics import SeedGradientCollector

logger = logging.getLogger(__name__)

T = TypeVar("T")

MEASURED = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
"""Dtypes that :func:`grad_stats` reads."""
COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def measurable(gradient: Tensor) -> Tensor | None:
    """Returns the numbers of a gradient as a dense real tensor, or None if they cannot be read."""
    if type(gradient) not in (Tensor, torch.nn.Parameter):
        # A DTensor has a part of its numbers, other subclasses have numbers of a form of their own.
        return None
    values = gradient.detach()
    if values.dtype in MEASURED and values.layout is torch.strided:
        return values
    if values.layout is torch.sparse_coo:
        values = values.coalesce().values()
    elif values.layout in COMPRESSED:
        values = values.values()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if values.dtype not in MEASURED or values.layout is not torch.strided:
        return None
    return values


def measure(
    owners: Sequence[Iterable[Tensor]],
    max_norm: float,
    exploding_norm: float,
    device: torch.device,
) -> GradStats:
    """Measures the gradients of each owner, on all devices that they are on.

    Gradients that cannot be measured are left out; each kind of them is logged once. Results are on ``device``, as
    those of :func:`grad_stats`, but have no ``norms``.
    """
    readable: dict[torch.device, list[list[Tensor]]] = {device: [[] for _ in owners]}
    for index, gradients in enumerate(owners):
        for gradient in gradients:
            values = measurable(gradient)
            if values is None:
                _say_left_out(type(gradient).__name__, str(gradient.dtype))
                continue
            readable.setdefault(values.device, [[] for _ in owners])[index].append(values)
    parts = []
    for place, values_by_owner in readable.items():
        stats = grad_stats(values_by_owner, max_norm, exploding_norm, device=place)
        parts.append(stats.fields.to(device))
    if len(parts) == 1:
        return GradStats(parts[0], parts[0].new_empty(0))
    return _joined(torch.stack(parts), max_norm)


def _joined(parts: Tensor, max_norm: float) -> GradStats:
    """Joins statistics of the same owners on several devices, float64 [D, G, F]."""
    fields = dict(zip(FIELDS, parts.sum(0).unbind(1), strict=True))
    by_device = dict(zip(FIELDS, parts.unbind(2), strict=True))
    tensors, norm = fields["tensors"], fields["sum_sq"].sqrt()
    finite = torch.isfinite(norm)
    # A device without gradients of an owner has a smallest norm of 0, which counts for nothing.
    smallest = torch.where(by_device["tensors"] > 0, by_device["min_norm"], torch.inf).amin(0)
    fields["min_norm"] = torch.where(tensors > 0, smallest, 0)
    fields["max_norm"] = by_device["max_norm"].amax(0)
    fields["norm"] = norm
    lost = (0.5 * fields["vanishing"] + 0.8 * fields["exploding"]) / tensors.clamp(min=1)
    fields["health"] = torch.where(finite & (tensors > 0), (1 - lost).clamp(0, 1), 0)
    fields["clip_coef"] = torch.where(finite, (max_norm / (norm + 1e-6)).clamp(max=1), 0)
    joined = torch.stack([fields[name] for name in FIELDS], dim=1)
    return GradStats(joined, joined.new_empty(0))


@cache
def _say_left_out(kind: str, dtype: str) -> None:
    logger.warning(
        "Gradients of the kind %s with %s are left out of the statistics of gradients; they train as ever.",
        kind,
        dtype,
    )


@torch.no_grad()
def clip_seeds(
    owners: Sequence[Sequence[Tensor]],
    collector: SeedGradientCollector,
    config: TaskConfig,
    scale: Tensor | None,
    scaled: bool,
) -> list[int]:
    """Clips the gradients of each seed to ``max_grad_norm``, and adds the statistics of all to ``collector``.

    Args:
        owners: parameters of the host, and of each learning seed.
        scale: divides the gradients in the step itself, as fused optimizers do; None: nothing does.
        scaled: whether a GradScaler made this step, so that gradients may overflow.

    Returns the indices of the owners whose step is to be skipped, because the scale is too large for them alone.
    """
    gradients = [[p.grad for p in parameters if p.grad is not None] for parameters in owners]
    measured = gradients
    if scale is not None:
        measured = [[gradient / scale.to(gradient.device) for gradient in of_owner] for of_owner in gradients]
    stats = measure(measured, config.max_grad_norm, config.exploding_norm, device=owners[0][0].device)
    # A branch that was left out of this step, as by LayerDrop, has no gradient that could be healthy or not.
    left_out = stats.tensors == 0
    if scaled:
        left_out = left_out | (stats.clip_coef == 0)
    collector.add(stats, left_out)
    for of_seed, factor in zip(gradients[1:], stats.clip_coef[1:], strict=True):
        if factor.is_cpu and factor.item() == 1:
            continue
        for gradient in of_seed:
            gradient.mul_(factor.to(gradient.device))
    if not scaled:
        return []
    return [index for index, factor in enumerate(stats.clip_coef.tolist()) if index and factor == 0]


class GradStash:
    """Keeps gradients of seeds out of ``parameter.grad``, which a loop may read, clip or unscale."""

    def __init__(self) -> None:
        self._gradients: dict[Tensor, Tensor] = {}

    def __bool__(self) -> bool:
        return bool(self._gradients)

    def get(self, parameter: Tensor) -> Tensor | None:
        return self._gradients.get(parameter)

    def take(self, parameter: Tensor) -> None:
        """Takes a parameter's ``grad``, and adds it to what was taken before."""
        if parameter.grad is not None:
            self.add(parameter, parameter.grad)
            parameter.grad = None

    def add(self, parameter: Tensor, gradient: Tensor) -> None:
        earlier = self._gradients.get(parameter)
        if earlier is None:
            self._gradients[parameter] = gradient
        elif earlier.requires_grad or gradient.requires_grad or earlier.layout is not torch.strided:
            self._gradients[parameter] = earlier + gradient
        else:
            earlier.add_(gradient)

    def hand_back(self, scale: Tensor | None) -> None:
        """Gives the parameters their gradients, times ``scale``, a scalar; None: as they are."""
        for parameter, gradient in self._gradients.items():
            if scale is not None:
                gradient = gradient * scale.to(gradient.device)
            parameter.grad = gradient
        self._gradients.clear()

    def add_to(
        self,
        other: GradStash,
        stashed: Collection[Tensor] | None = None,
    ) -> None:
        """Moves the gradients of ``stashed`` parameters, None: all, to ``other``, and adds the others to ``grad``."""
        for parameter, gradient in self._gradients.items():
            if stashed is None or parameter in stashed:
                other.add(parameter, gradient)
            elif parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad = gradient + parameter.grad
        self._gradients.clear()

    def drop(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Forgets the gradients of these parameters, or all."""
        if parameters is None:
            self._gradients.clear()
            return
        for parameter in parameters:
            self._gradients.pop(parameter, None)


class EarlierGradients:
    """Gradients of seeds from before the present pass, which count unless the loop clears those of the model.

    A loop may clear gradients between a pass and its backward pass, which does not reach those of seeds: what another
    network's loss has left in a discriminator, or a step that a GradScaler has skipped. A gradient of the model tells.
    """

    def __init__(self) -> None:
        self._stash = GradStash()
        self._witness: Tensor | None = None
        self._gradient: Tensor | None = None

    def __bool__(self) -> bool:
        return bool(self._stash)

    def get(self, parameter: Tensor) -> Tensor | None:
        return self._stash.get(parameter)

    def take(
        self,
        parameters: Iterable[Tensor],
        stash: GradStash,
        model: nn.Module,
        host: Collection[Tensor],
    ) -> None:
        """Takes the gradients of ``parameters`` and those in ``stash``, beside those of the ``host`` in the ``model``.

        Its first parameter with a gradient tells: the backward pass reaches that after the seeds.
        """
        held = set(host)
        for parameter in (*model.parameters(), *host):
            if parameter in held and has_gradient(parameter):
                self._witness = parameter
                self._gradient = parameter.grad
                break
        for parameter in parameters:
            self._stash.take(parameter)
        stash.add_to(self._stash)

    def settle(self) -> GradStash:
        """Returns the gradients that still count, and forgets all."""
        settled, self._stash = self._stash, GradStash()
        witness = self._witness
        if witness is None or witness.grad is not self._gradient or not has_gradient(witness):
            settled.drop()
        self._witness = self._gradient = None
        return settled

    def drop(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Forgets the gradients of these parameters, or all."""
        self._stash.drop(parameters)


def has_gradient(parameter: Tensor) -> bool:
    """Whether a parameter's gradient was not cleared, which ``zero_grad(set_to_none=False)`` does with zeros."""
    if parameter.grad is None:
        return False
    values = measurable(parameter.grad)
    return values is None or bool(values.any())


class BackwardWatch:
    """Notes whether the gradients of a model come from a backward pass, until it is known.

    Seeds get gradients in backward passes only. A loop that asks ``torch.autograd.grad`` for those of the model's
    parameters, and writes them into ``grad``, would leave seeds without any.
    """

    def __init__(self, model: nn.Module) -> None:
        self._handles: list[Any] = []
        self._watched: list[nn.Parameter] = []
        for parameter in model.parameters():
            if not parameter.requires_grad or isinstance(parameter, nn.parameter.UninitializedParameter):
                continue
            self._watched.append(parameter)
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._accumulated))  # type: ignore[no-untyped-call]

    def _accumulated(self, _parameter: Tensor) -> None:
        self.stop()

    def check(self) -> None:
        """Raises ConfigError if the model has gradients, and no backward pass has added to one; call it in a step.

        Zeros say nothing: torch.distributed.checkpoint steps on them, at a rate of 0, to make an optimizer's state.
        """
        if any(map(has_gradient, self._watched)):
            self.stop()
            raise ConfigError(
                "the model's gradients were set by hand, as from torch.autograd.grad: seeds get theirs only from "
                "backward passes. Call loss.backward() in each step, and change the gradients of the model after it"
            )

    def stop(self) -> None:
        """Ends the watch: nothing is checked from now on."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._watched.clear()


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP, of either version, has split the model's parameters over ranks."""
    if not dist.is_available() or not dist.is_initialized():
        return False
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel  # takes seconds to import

    return any(isinstance(module, FSDPModule | FullyShardedDataParallel) for module in model.modules())


class Ranks:
    """The ranks of a data-parallel loop, or one rank alone.

    Seeds are not parameters of the wrapped model, so their gradients are averaged here.

    Args:
        wrapper: averages the gradients of the model over its process group; None: nothing does.
    """

    def __init__(self, wrapper: nn.parallel.DistributedDataParallel | None = None) -> None:
        self.parallel = wrapper is not None
        self._wrapper = wrapper
        self._group: Any = None
        self._source = 0
        if wrapper is not None:
            self._group = wrapper.process_group
            self._source = dist.get_global_rank(self._group, 0)
        self.first = not self.parallel or dist.get_rank(self._group) == 0
        """Whether this is rank 0."""

    def check(self) -> None:
        """Raises ConfigError if ranks are there that this object does not know, or do not step together.

        Call it in each step: a loop may begin with one of both after the Grower was made.
        """
        if self._wrapper is not None:
            # Nothing public says whether a pass lies in `join()`.
            if self._wrapper._join_config.enable:
                raise ConfigError(
                    "the model trains in join(), in which a rank may make fewer steps than others, and gradients of "
                    "seeds are averaged in every step: give all ranks equally many batches, as DistributedSampler does"
                )
        elif dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise ConfigError(
                f"torch.distributed has {dist.get_world_size()} ranks, and the model is in no DistributedDataParallel: "
                "each rank would grow other seeds. Pass the model as DistributedDataParallel, or a library that uses "
                "it, has returned it"
            )

    def average(self, parameters: Sequence[Tensor]) -> None:
        """Averages the gradients of ``parameters`` over the ranks, in place.

        A rank without a gradient, such as one that dropped the branch of a seed, counts as zeros and gets the average.
        A parameter without a gradient on any rank keeps none.
        """
        if not self.parallel:
            return
        alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for parameter in parameters:
            kind = (parameter.device, parameter.dtype)
            alike.setdefault(kind, []).append(parameter)
        for group in alike.values():
            self._average(group)

    def _average(self, parameters: list[Tensor]) -> None:
        """Averages the gradients of parameters of one device and dtype, in one message."""
        present = []
        parts = []
        for parameter in parameters:
            present.append(parameter.grad is not None)
            gradient = parameter.new_zeros(parameter.shape) if parameter.grad is None else parameter.grad.to_dense()
            parts.append(gradient.flatten())
        parts.append(parameters[0].new_tensor(present))
        flat = torch.cat(parts)
        dist.all_reduce(flat, group=self._group)
        *sums, counts = torch.split(flat, list(map(torch.numel, parts)))
        nowhere = [False] * len(parameters)
        # Reading the counts waits for the device, so only a rank that lacks a gradient does.
        if not all(present):
            nowhere = (counts == 0).tolist()
        for parameter, total, none in zip(parameters, sums, nowhere, strict=True):
            parameter.grad = None if none else (total / dist.get_world_size(self._group)).view_as(parameter)

    def largest(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns the element-wise maximum over the ranks of ``values`` [n]."""
        if not self.parallel:
            return values
        gathered: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(gathered, values, self._group)
        largest: NDArray[np.float64] = np.max(gathered, axis=0)
        return largest

    def of_first(self, value: T) -> T:
        """Returns the value that rank 0 has."""
        if not self.parallel:
            return value
        shared = [value]
        dist.broadcast_object_list(shared, self._source, self._group)
        return shared[0]

    def copy_from_first(self, tensors: Iterable[Tensor]) -> None:
        """Overwrites tensors by those of rank 0."""
        if not self.parallel:
            return
        for tensor in tensors:
            dist.broadcast(tensor, self._source, self._group)


def plain_model(model: nn.Module) -> tuple[nn.Module, Ranks]:
    """Returns the network inside ``DistributedDataParallel``, or ``model``, and the ranks that train it.

    Wrappers around ``DistributedDataParallel``, such as that of Lightning Fabric, are taken off, too. Raises
    ConfigError for a compiled model: seeds that come and go would recompile it at every change.
    """
    if isinstance(model, nn.DataParallel):
        raise ConfigError("nn.DataParallel copies the model for each pass; use DistributedDataParallel")
    if is_sharded(model):
        raise ConfigError("the model's parameters are split over ranks, and seeds are not; use DistributedDataParallel")
    if is_compiled(model):
        raise ConfigError(
            "the model is compiled, and every change of a seed would compile it again: pass the model itself, and "
            "compile what grower.finish() returns"
        )
    wrappers = [module for module in model.modules() if isinstance(module, nn.parallel.DistributedDataParallel)]
    if not wrappers:
        ranks = Ranks()
        ranks.check()
        return model, ranks
    averaged = set(wrappers[0].parameters())
    if len(wrappers) > 1 or any(p.requires_grad and p not in averaged for p in model.parameters()):
        raise ConfigError("DistributedDataParallel holds only a part of the model: put all of it into one")
    return wrappers[0].module, Ranks(wrappers[0])


class _Graph(torch.autograd.Function):
    """The identity, whose output needs a gradient."""

    @staticmethod
    def forward(_context: Any, h: Tensor, _anchor: Tensor) -> Tensor:
        return h.clone()

    @staticmethod
    def jvp(_context: Any, of_h: Tensor, _of_anchor: None) -> Tensor:
        return of_h.clone()

    @staticmethod
    def backward(_context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def with_graph(h: Tensor) -> Tensor:
    """Returns ``h`` as a part of a graph, so that a loss of a frozen network without seeds has a backward pass."""
    if h.requires_grad:
        return h
    anchor = torch.zeros((), device=h.device, requires_grad=True)
    return _Graph.apply(h, anchor)  # type: ignore[no-any-return, no-untyped-call]
