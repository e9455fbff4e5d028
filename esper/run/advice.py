"""Advice before any training: the gain that an advisor predicts for wider layers, and their price."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from reprlib import repr as short
from typing import Any

import torch
from torch import nn

from esper.agents.advised import parameters_by_multiple
from esper.agents.advisor import HostFacts, shipped, unlike_words
from esper.config import ConfigError
from esper.core.sizing import WIDENINGS
from esper.hosts.example import counting, outputs_of, require_outputs, tensors_in
from esper.hosts.find import AUTO, FoundSite, find_sites, named_sites, samples_of
from esper.hosts.sources import SitePath

DOUBLED = WIDENINGS[2]
"""The blueprint that makes a layer twice as wide."""


@dataclass(frozen=True)
class Plan:
    """All layers at one multiple of their widths."""

    multiple: int
    parameters: int
    """About as many as the network has then."""
    gain: float
    """Predicted rise of the final accuracy beside the network as it is, pp."""
    error: float
    """Standard deviation of the predictions of the advisor's networks, pp."""
    cost: float
    """Price of the parameters, pp."""

    @property
    def net(self) -> float:
        return self.gain - self.cost


@dataclass(frozen=True)
class Advice:
    """The plans for a network, with what an advisor predicts of each; printed, a table."""

    layers: dict[str, int]
    """Number of units of the layers that become wider, by the path of their site."""
    plans: tuple[Plan, ...]
    """The multiples on offer; the first is 1."""
    price: float
    """Accuracy that a doubling of the parameters has to bring, pp."""
    unlike: tuple[str, ...] = ()
    """Names of numbers that are far from those of all trainings that the advisor learned from."""

    @property
    def chosen(self) -> Plan:
        """The plan whose gain exceeds its cost by most."""
        return max(self.plans, key=lambda plan: plan.net)

    def __repr__(self) -> str:
        best = self.chosen
        return f"Advice({', '.join(self.layers)}: ×{best.multiple}, {best.gain:+.1f} pp for {best.cost:.1f} pp)"

    def __str__(self) -> str:
        widths = ", ".join(f"{path} ({units} units)" for path, units in self.layers.items())
        lines = [f"layers: {widths}", "widths  parameters   gain, pp        cost, pp  gain - cost"]
        for plan in self.plans:
            mark = " <- advised" if plan == self.chosen else ""
            lines.append(
                f"×{plan.multiple:<5d}  {plan.parameters:>10,}  {plan.gain:+6.1f} ± {plan.error:<4.1f}  "
                f"{plan.cost:>12.1f}  {plan.net:>+11.1f}{mark}"
            )
        if len(self.plans) > 1:
            lines.append("±: standard deviation over the advisor's eight networks")
        if self.unlike:
            lines.append(f"the advisor warns: {unlike_words(self.unlike)}")
        return "\n".join(lines)


def advise(
    model: nn.Module,
    example: Any,
    *,
    samples: int,
    classes: int,
    epochs: int,
    learning_rate: float,
    batch_size: int = 32,
    price: float = 1.0,
    sites: Sequence[str] | None = None,
) -> Advice:
    """Predicts, before any training, what wider layers would bring a classifier.

    Args:
        model: the network, which stays as it is.
        example: a few of its inputs, as for :func:`esper.find_sites`.
        samples: number of training samples.
        classes: number of classes.
        epochs: number of epochs that the network is to be trained for.
        learning_rate: of its optimizer.
        batch_size: samples in a step.
        price: accuracy that a doubling of the parameters has to bring, pp.
        sites: pairs of layers between which units are added, such as ``"fc1 -> fc2"``; None: those of
            ``sites="auto"``.

    Raises:
        ConfigError: a number is not positive, the model cannot run on ``example``, or it has fewer outputs than classes
            or no layer that can be wider.
    """
    _check(samples=samples, classes=classes, epochs=epochs, batch_size=batch_size)
    if not learning_rate > 0 or not math.isfinite(learning_rate):
        raise ConfigError(f"learning_rate is {short(learning_rate)}; it must be a positive number")
    if not price >= 0 or not math.isfinite(price):
        raise ConfigError(f"price is {short(price)}; it must be a number of pp, 0 or more")
    found = _widenings(model, example, sites)
    parameters = sum(p.numel() for p in model.parameters())
    around = sum(site.blueprints[DOUBLED].parameters for site in found)
    counts = parameters_by_multiple(parameters, around, _between(model, found))
    rows = samples_of(example) or 1
    with torch.no_grad(), counting() as counter:
        outputs = outputs_of(model, example)
    require_outputs(classes, outputs)
    values = sum(tensor.numel() for tensor in tensors_in(example)) // rows
    facts = HostFacts(
        widths=tuple(float(site.width) for site in found),
        parameters=counts,
        operations=counter.get_total_flops() / rows,
        inputs=values,
        classes=classes,
        convolutional=any(_is_spatial(model, site) for site in found),
        samples=samples,
        epochs=epochs,
        updates=samples // min(batch_size, samples) * epochs,
        rate=learning_rate,
    )
    advisor = shipped()
    gains = advisor.gains(facts)
    plans = []
    for number, (multiple, cost) in enumerate(zip(counts, facts.costs(price), strict=True)):
        of_members = gains[:, number]
        plans.append(
            Plan(
                multiple,
                round(counts[multiple]),
                float(of_members.mean()),
                float(of_members.std()),
                float(cost),
            )
        )
    layers = {site.path: site.width for site in found}
    return Advice(layers, tuple(plans), price, tuple(advisor.unlike(facts)))


def _check(**counts: int) -> None:
    for name, count in counts.items():
        least = 2 if name == "classes" else 1
        if not isinstance(count, Integral) or count < least:
            raise ConfigError(f"{name} is {short(count)}; it must be a number of {least} or more")


def _widenings(model: nn.Module, example: Any, sites: Sequence[str] | None) -> list[FoundSite]:
    """Returns the sites where layers can be doubled. Raises ConfigError without any, and for one that cannot."""
    possible = {}
    for site in find_sites(model, example):
        if DOUBLED in site.blueprints:
            possible[site.path] = site
    if not possible:
        raise ConfigError("no layer of the model can be wider; esper.find_sites lists where seeds can grow")
    if sites is None:
        return [possible[path] for path in named_sites(model, AUTO, example).values() if path in possible]
    other = [path for path in sites if path not in possible]
    if other:
        raise ConfigError(f"no layer of {', '.join(other)} can be wider; these can: {', '.join(possible)}")
    return [possible[path] for path in sites]


def _between(model: nn.Module, found: Sequence[FoundSite]) -> int:
    """Returns the number of weights of layers that read the units of one site, and whose own units another adds to."""
    paths = [SitePath.parse(site.path) for site in found]
    count = 0
    for first in paths:
        for second in paths:
            if first is not second and first.sink == second.source:
                count += model.get_submodule(first.sink).get_parameter("weight").numel()
    return count


def _is_spatial(model: nn.Module, site: FoundSite) -> bool:
    """Whether one of the two layers of a site reads several positions at a time."""
    path = SitePath.parse(site.path)
    for name in (path.source, path.sink):
        layer = model.get_submodule(name or "")
        kernel = getattr(layer, "kernel_size", None)
        if kernel is not None and math.prod(kernel) > 1:
            return True
    return False
