"""LoRA and AdaLoRA by PEFT, as controls that compute as much as the grown host.

Importing this module registers the arms ``lora`` and ``adalora``.

Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models"; Zhang et al. 2023, "Adaptive Budget Allocation for
Parameter-Efficient Fine-Tuning".
"""

from __future__ import annotations

import importlib.util
from collections.abc import Collection
from dataclasses import replace
from itertools import chain
from types import ModuleType
from typing import Any, Self

import torch
from torch import Tensor, nn

from benchmarks.alternatives import require_start
from esper.compare.controls import Control, ControlRunner, at_compute, register
from esper.compare.runner import HostResult
from esper.config import ConfigError
from esper.core.place import Features
from esper.hosts.host import Host, SegmentedHost, SiteHook, layers_of
from esper.hosts.inputs import Inputs
from esper.hosts.zoo import import_torchvision

ADAPTER = "default"
START_RANKS = 1.5
"""Ranks that AdaLoRA begins with, in units of those that it ends with."""
FREE_SHARE, FINAL_SHARE = 0.1, 0.3
"""Shares of the steps before AdaLoRA begins to take ranks away, and after it has ended."""


def import_peft() -> ModuleType:
    """Imports PEFT. Raises ConfigError if it is not installed."""
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(
            'LoRA and AdaLoRA are those of PEFT, which is not installed: pip install "peft>=0.18"'
        )
    if importlib.util.find_spec("torchvision") is not None:
        import_torchvision()  # PEFT imports it through transformers
    return importlib.import_module("peft")


class AdaptedHost(Host):
    """A host whose own layers are frozen but the last one, with adapters beside the linear layers before it.

    Args:
        host: the host, probed; its layers are wrapped in place.
        rank: rank of each adapter, or with ``steps``, the mean rank at the end.
        steps: number of steps of the training, for AdaLoRA, which moves ranks between layers; None: LoRA.

    Raises ConfigError without PEFT, and if the host has no linear layer before its last layer.
    """

    def __init__(self, host: Host, rank: int, steps: int | None = None) -> None:
        super().__init__()
        peft = import_peft()
        names, head = layers_to_adapt(host)
        if steps is None:
            self.tuner = None
            config = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=names)
            peft.inject_adapter_in_model(config, host, ADAPTER)
        else:
            start = round(START_RANKS * rank)
            config = peft.AdaLoraConfig(
                target_r=rank,
                init_r=start,
                lora_alpha=start,
                target_modules=names,
                total_step=max(steps, 3),
                tinit=int(FREE_SHARE * steps),
                tfinal=int(FINAL_SHARE * steps),
                deltaT=max(1, steps // 100),
            )
            # A list, so that it is not a submodule: the host is one of it, too.
            self.tuner = [peft.AdaLoraModel(host, config, ADAPTER)]
        for parameter in head.parameters():
            parameter.requires_grad_(True)
        if isinstance(host, SegmentedHost):
            host.follow_layers()
        self.host = host
        self.sites = host.sites
        self.topology = host.topology
        self.in_place = host.in_place
        self._gradients: dict[nn.Parameter, Tensor] = {}
        self._step = 0
        if self.tuner is not None:
            self._watch(config.orth_reg_weight)

    @property
    def parameter_count(self) -> int:
        """Number of parameters of the host and of the ranks that count."""
        named = self.host.named_parameters()
        own = sum(
            p.numel()
            for name, p in named
            if ".lora_" not in name and ".ranknum." not in name
        )
        return own + sum(
            _size(layer) for layer in self.host.modules() if hasattr(layer, "lora_A")
        )

    def probe(self, x: Inputs) -> None:
        self.host.probe(x)

    def train(self, mode: bool = True) -> Self:
        """Sets the mode of all layers but those with statistics, which stay as they are."""
        super().train(mode)
        for layer in self.host.modules():
            if next(layer.buffers(recurse=False), None) is not None:
                layer.eval()
        return self

    def forward_with_hook(
        self, x: Inputs, hook: SiteHook, vacant: Collection[int] = ()
    ) -> Tensor:
        self._move_ranks()
        return self.host.forward_with_hook(x, hook, vacant)

    def forward_from(
        self,
        x: Inputs,
        site: int,
        at: Features,
        hook: SiteHook,
        vacant: Collection[int] = (),
    ) -> Tensor:
        return self.host.forward_from(x, site, at, hook, vacant)

    @torch.no_grad()
    def take(self, trained: Host) -> None:
        """Copies the weights of a host like the one inside."""
        own = dict(chain(self.host.named_parameters(), self.host.named_buffers()))
        plain = {
            name.replace(".base_layer", ""): tensor for name, tensor in own.items()
        }
        for name, tensor in chain(trained.named_parameters(), trained.named_buffers()):
            plain[name].copy_(tensor)

    def _watch(self, weight: float) -> None:
        """Keeps the gradients of each step for AdaLoRA, and adds those of its penalty on directions that are not
        orthonormal: ``weight`` times the mean of ‖A·Aᵀ − I‖ and ‖Bᵀ·B − I‖ over all matrices."""
        named = [
            (name, p) for name, p in self.host.named_parameters() if ".lora_" in name
        ]
        share = weight / sum("lora_E" not in name for name, _ in named)
        for name, parameter in named:
            if "lora_E" not in name:
                penalise(parameter, "lora_A" in name, share)
            parameter.register_post_accumulate_grad_hook(self._keep_gradient)  # type: ignore[no-untyped-call]

    def _keep_gradient(self, parameter: Tensor) -> None:
        if isinstance(parameter, nn.Parameter) and isinstance(parameter.grad, Tensor):
            self._gradients[parameter] = parameter.grad

    def _move_ranks(self) -> None:
        """Lets AdaLoRA see the gradients of the last step, once it has been made, and take ranks away.

        That is at the start of the pass after it: gradients are dropped when the next step begins.
        """
        if self.tuner is None or not self._gradients:
            return
        if self.training and any(p.grad is not None for p in self._gradients):
            return  # a further part of the same batch
        with torch.inference_mode(False), torch.no_grad():
            there = {p: p.grad for p in self._gradients}
            for parameter, gradient in self._gradients.items():
                parameter.grad = gradient
            self.tuner[0].update_and_allocate(self._step)
            for parameter, old in there.items():
                parameter.grad = old
        self._gradients.clear()
        self._step += 1


def _size(layer: Any) -> int:
    """Returns the number of parameters of an adapter, of the ranks that are not taken away."""
    matrices = layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]
    if isinstance(matrices[0], nn.Module):
        return sum(matrix.weight.numel() for matrix in matrices)
    values = layer.lora_E[ADAPTER]
    kept = int(values.count_nonzero()) or len(values)  # they begin as zeros
    return kept * int(matrices[0].shape[1] + matrices[1].shape[0] + 1)


def penalise(matrix: nn.Parameter, wide: bool, weight: float) -> None:
    """Adds ``weight`` times the penalty of :func:`_towards_orthonormal` to the gradient of ``matrix``."""

    def add(gradient: Tensor) -> Tensor:
        return gradient + weight * _towards_orthonormal(matrix, wide)

    matrix.register_hook(add)  # type: ignore[no-untyped-call]


@torch.no_grad()
def _towards_orthonormal(matrix: Tensor, wide: bool) -> Tensor:
    """Returns the gradient of ‖M·Mᵀ − I‖ for a ``wide`` matrix, else of ‖Mᵀ·M − I‖."""
    m = matrix if wide else matrix.T
    excess = m @ m.T - torch.eye(len(m), device=m.device)
    gradient: Tensor = 2 * excess @ m / excess.norm().clamp(min=1e-12)
    return gradient if wide else gradient.T


def layers_to_adapt(host: Host) -> tuple[list[str], nn.Module]:
    """Returns the names of the linear layers before the last layer with parameters, and that one.

    Raises ConfigError without any.
    """
    *before, (_, head) = layers_of(host).items()
    names = [name for name, layer in before if isinstance(layer, nn.Linear)]
    if not names:
        raise ConfigError(
            "LoRA and AdaLoRA adapt linear layers, and this host has none before its last layer"
        )
    return names, head


def size_of_rank(host: Host) -> int:
    """Returns the number of parameters of adapters of rank 1. Raises ConfigError without a layer to adapt."""
    layers = dict(host.named_modules())
    linear = [layers[name] for name in layers_to_adapt(host)[0]]
    return sum(
        layer.in_features + layer.out_features
        for layer in linear
        if isinstance(layer, nn.Linear)
    )


@register
class AdapterRunner(ControlRunner):
    """Trains LoRA adapters of PEFT beside the frozen host, and its last layer, for as much compute.

    Their rank is the one whose number of parameters is nearest to what the grown host has more than the host.
    """

    kind = "lora"
    adaptive = False

    def check(self) -> None:
        super().check()
        require_start(self.kind, self.task)
        if self.adaptive and self.task.device.type == "cuda":
            raise ConfigError(
                f"{self.kind} counts its steps in Python, which captured steps do not: run.device=cpu"
            )
        import_peft()
        size_of_rank(self.host)

    def make(self, grown: HostResult) -> Control:
        added = grown.parameters - self.host.parameter_count
        rank = max(1, round(added / size_of_rank(self.host)))
        # The cost of a pass does not depend on the number of steps, which is known only afterwards.
        control = self._adapted(rank, steps=1 if self.adaptive else None)
        task, config, facts = at_compute(control, grown.flops, self.blueprints)
        if self.adaptive:
            steps_per_epoch = config.trained_samples // config.task.batch_size
            task, _, _ = self._adapted(
                rank, config.env.episode_length * steps_per_epoch
            )
        facts |= {"rank": rank, "wanted_parameters": grown.parameters}
        return task, config, facts

    def _adapted(self, rank: int, steps: int | None) -> Control:
        """Returns the control whose adapters have ``rank``; adaptive ones have a plan for ``steps``."""
        task = self.task
        sample = task.sample.cpu()

        def build() -> Host:
            host = task.build_host()
            host.probe(sample)  # initialises lazy layers and finds the sites of a graft
            return AdaptedHost(host, rank, steps)

        transfer = take_frozen if task.trained else None
        adapted = replace(task, build_host=build, slots=None, transfer=transfer)
        config = self.config.with_values(
            env={"slots": None}, task={"freeze": "nothing"}
        )
        return adapted, config, {}


@register
class AdaptiveAdapterRunner(AdapterRunner):
    """The same with AdaLoRA, which moves ranks between layers."""

    kind = "adalora"
    adaptive = True


def take_frozen(trained: Host, host: Host) -> None:
    """Gives the host inside an adapted one its weights."""
    assert isinstance(host, AdaptedHost)
    host.take(trained)
