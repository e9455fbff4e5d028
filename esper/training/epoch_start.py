"""What an epoch of training changes in one env, as it was before, so that the epoch can be done again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from esper.training.env_state import ParallelEnvState


class EpochStart:
    """Copies of host, seeds, momentum and the buffers of shadows, and the states of generators.

    Its storage is kept and filled again by the next capture. What :func:`esper.training.host_step.begin_epoch` sets
    anew is not in it.
    """

    def __init__(self) -> None:
        self._copies: dict[str, Tensor] = {}
        self._generators: dict[str, Tensor] = {}

    def capture(self, env: ParallelEnvState) -> None:
        """Copy the env's present state; nothing waits for a GPU."""
        self.epoch, self._shadows = env.epoch, set(env.shadows)
        self._scale = env.arithmetic.state_dict()
        self._generators = {name: generator.get_state() for name, generator in _generators(env)}
        live = dict(_tensors(env))
        for name in [name for name in self._copies if name not in live]:
            del self._copies[name]
        with torch.no_grad():
            for name, tensor in live.items():
                kept = self._copies.get(name)
                if kept is not None and (kept.shape, kept.dtype) == (tensor.shape, tensor.dtype):
                    kept.copy_(tensor)
                else:
                    self._copies[name] = tensor.detach().clone()

    def restore(self, env: ParallelEnvState) -> None:
        """Put everything back, bit for bit; gradients, of whatever step they are, go."""
        env.epoch, env.batch, env.part = self.epoch, 0, 0
        env.arithmetic.load_state_dict(self._scale)
        for group in (env.host_group, *env.seed_groups.values()):
            for parameter in group.parameters:
                parameter.grad = None
        for name in [name for name in env.shadows if name not in self._shadows]:
            del env.shadows[name]  # its incubation began in the epoch that is done again
        for name, generator in _generators(env):
            generator.set_state(self._generators[name])
        with torch.no_grad():
            for name, tensor in _tensors(env):
                tensor.copy_(self._copies[name])


def _generators(env: ParallelEnvState) -> Iterator[tuple[str, torch.Generator]]:
    yield "order", env.order
    yield "dropout", env.dropout
    for slot, generator in env.shadow_dropout.items():
        yield f"shadow {slot}", generator


def _tensors(env: ParallelEnvState) -> Iterator[tuple[str, Tensor]]:
    """Whatever a training step writes, by a stable name."""
    networks: list[tuple[str, Any]] = [("host", env.host)]
    networks += [(slot.name, slot.seed) for slot in env.slots if slot.seed is not None]
    for owner, network in networks:
        for name, parameter in network.named_parameters():
            yield f"{owner}.{name}", parameter
        for name, buffer in network.named_buffers():
            yield f"{owner}.{name}", buffer
    for group in (env.host_group, *env.seed_groups.values()):
        for index, parameter in enumerate(group.parameters):
            momentum = group.optimizer.state.get(parameter, {}).get("momentum_buffer")
            if momentum is not None:
                yield f"{group.name}.momentum.{index}", momentum
    for slot in env.slots:
        if slot.finite is not None:
            yield f"{slot.name}.finite", slot.finite
    for name, shadow in env.shadows.items():
        for index, buffer in enumerate(shadow.tensors()):
            yield f"{name}.shadow.{index}", buffer
