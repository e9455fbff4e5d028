"""Sites: the places in a host that can each hold the module of one seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from esper.core.blend import Seed
from esper.core.blueprints.registry import Blueprint
from esper.core.place import Features, Place
from esper.core.ramps import BlendOperator, BlendStyle
from esper.ops.torch_state import training_state


class Role(Enum):
    """The role of a site in the passes of an epoch."""

    ABSENT = 0
    """Nothing: there is no seed, or it does not take part yet."""
    INCUBATING = 1
    """Its seed trains beside the host, whose output it does not change."""
    BLENDED = 2
    """out = h + alpha · d(h); a seed that becomes non-finite is cut out."""
    FOSSIL = 3
    """As BLENDED, as a permanent part of the host, which the governor watches."""


class GerminationFailed(RuntimeError):
    """Raised if a blueprint does not fit a site; the site is unchanged."""


@training_state()
def seed_of(
    blueprint: Blueprint,
    operator: BlendOperator,
    place: Place,
    leading: int | None = None,
) -> Seed:
    """Makes a seed for ``place``, or for the ``leading`` first channels of it."""
    order = place.order
    if blueprint.only_added:
        operator = BlendOperator.ADD
        order = ()
    if leading is not None:
        place = replace(place, channels=leading)
    seed = Seed(
        blueprint.body(place),
        operator,
        place.channels,
        blueprint.topology,
        order,
    )
    seed.leading = leading
    return seed


@dataclass(eq=False)
class PlantedSeed:
    """A seed at a site: its module, and what it was made of."""

    module: Seed
    blueprint: Blueprint
    style: BlendStyle
    finite: Tensor
    """False once the seed had a non-finite value, a bool scalar on the device."""
    stays: str = ""
    """The reason why it cannot become a part of the layers at its place; empty if it was not tried."""


class Site:
    """One site and the seed in it; an empty one has the role ABSENT and alphas of 0."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.name = place.name
        self._flags: WeakKeyDictionary[Seed, Tensor] = WeakKeyDictionary()
        self.remove()

    def remove(self) -> None:
        """Empties the site."""
        self.planted: PlantedSeed | None = None
        self.assign(Role.ABSENT)

    def assign(
        self,
        role: Role,
        alpha: float = 0.0,
        target: float = 0.0,
        learning: bool | None = None,
    ) -> None:
        """Sets what the seed does from now on.

        Args:
            role: its role.
            alpha: its share in the forward pass.
            target: the alpha of its trials.
            learning: whether the optimizer steps it; None: in every role but ABSENT.

        Raises ValueError for another role than ABSENT without a seed.
        """
        present = role is not Role.ABSENT
        if present and self.planted is None:
            raise ValueError(f"{self.name} has no seed that could be {role.name}")
        self.role = role
        self.alpha = alpha
        self.target = target
        self.learning = present if learning is None else learning

    @property
    def seed(self) -> Seed | None:
        """The seed's module."""
        if self.planted is None:
            return None
        return self.planted.module

    @property
    def recipe(self) -> dict[str, Any]:
        """Plain values that make a seed like the planted one again; empty without one."""
        if self.planted is None:
            return {}
        return {
            "blueprint": self.planted.blueprint.name,
            "topology": self.place.topology,
            "order": list(self.place.order),
            "style": self.planted.style.name,
            "channels": self.planted.module.channels,
        }

    @property
    def incubating(self) -> bool:
        return self.role is Role.INCUBATING

    @property
    def on(self) -> bool:
        """True if the seed is in the host's forward pass: a blended one or a fossil."""
        return self.role in (Role.BLENDED, Role.FOSSIL)

    @property
    def fossil(self) -> bool:
        return self.role is Role.FOSSIL

    @property
    def parameters(self) -> int:
        if self.planted is None:
            return 0
        return sum(p.numel() for p in self.planted.module.parameters())

    @training_state()
    def plant(
        self,
        blueprint: Blueprint,
        style: BlendStyle,
        probe: Features,
        prepare: Callable[[Seed], Seed] = lambda seed: seed,
        leading: int | None = None,
    ) -> PlantedSeed:
        """Builds a seed, tries it on ``probe`` (a pass at this site), and plants ``prepare(seed)``.

        ``leading`` is that of :func:`seed_of`.

        Raises GerminationFailed if the blueprint cannot be built or prepared, has no parameter that trains or another
        total number of parameters than it says, changes the shape or gives non-finite values. The site is then
        unchanged.
        """
        where = f"{blueprint.name} in {self.name}"
        try:
            seed = seed_of(blueprint, style.operator, self.place, leading)
            size = sum(p.numel() for p in seed.body.parameters())
            said = size if leading is not None else blueprint.size(self.place)
            seed.to(probe.h.device, torch.promote_types(probe.h.dtype, torch.float32))
            with torch.no_grad():
                seed.eval()
                delta = seed(probe.source)
            guard_group_norm(seed)
            seed = prepare(seed)
        except Exception as error:  # a user's factory may raise anything; it must not end the run
            raise GerminationFailed(f"{where}: {type(error).__name__}: {error}") from error
        if not any(parameter.requires_grad for parameter in seed.parameters()):
            raise GerminationFailed(f"{where}: it has no parameters to train")
        if size != said:
            raise GerminationFailed(f"{where}: it has {size} parameters, but its `parameters` says {said}")
        if delta.shape != probe.h.shape:
            shapes = f"{tuple(probe.source.shape)} into {tuple(delta.shape)}"
            wanted = f"it adds to {tuple(probe.h.shape)}"
            if probe.source is probe.h:
                wanted = "a seed keeps the shape"
            raise GerminationFailed(f"{where} turns {shapes}; {wanted}")
        if not torch.isfinite(delta).all():
            raise GerminationFailed(f"{where}: its output is not finite")
        if blueprint.zero_at_birth and delta.any():
            raise GerminationFailed(f"{where}: it is said to be zero at birth, and its output is not")
        flag = torch.ones((), dtype=torch.bool, device=probe.h.device)
        finite = self._flags.setdefault(seed, flag)
        finite.fill_(True)  # a seed that is planted again keeps its memory
        self.planted = PlantedSeed(seed.train(), blueprint, style, finite)
        self.assign(Role.ABSENT)
        return self.planted


def guard_group_norm(module: nn.Module) -> None:
    """Makes inputs of the GroupNorm layers of ``module`` contiguous in training passes if they require no gradient.

    torch's CPU kernel (2.13) crashes the process in the backward pass for channels_last inputs that require no
    gradient, such as the features of an incubating seed.
    """
    for layer in module.modules():
        if isinstance(layer, nn.GroupNorm):
            layer.register_forward_pre_hook(contiguous_input, with_kwargs=True)


def contiguous_input(
    _layer: nn.Module,
    positional: tuple[Tensor, ...],
    named: dict[str, Tensor],
) -> tuple[tuple[Tensor], dict[str, Tensor]]:
    """Forward pre-hook of a GroupNorm, see :func:`guard_group_norm`."""
    h = positional[0] if positional else named["input"]
    if h.device.type == "cpu" and torch.is_grad_enabled() and not h.requires_grad:
        h = h.contiguous()
    return (h,), {}
