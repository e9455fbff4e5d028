"""The model of a loop as a host that can be rolled back."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import chain

from torch import Tensor

from esper.grower.hooks import SiteHooks
from esper.grower.optimizer import SeedGroups
from esper.seeds.site import Role, Site
from esper.training.host_training import HOST, count_not_finite, finite_buffers


class LoopHost:
    """A model with its seeds and the state of their optimizer, for ``esper.training.snapshot``.

    A rollback does not touch what it does not know: learning-rate schedules, the scale of a GradScaler, averages of
    weights, and numbers in the optimizer's state that are not tensors.
    """

    def __init__(self, hooks: SiteHooks, groups: SeedGroups) -> None:
        self.hooks, self.groups = hooks, groups
        self.epoch = 0
        """Number of epochs since the first :meth:`Grower.step`."""
        self._finite = finite_buffers(hooks.model)

    def assign(self, site: Site, role: Role, alpha: float, target: float, learning: bool) -> None:
        site.assign(role, alpha, target, learning)

    def remove(self, site: Site) -> None:
        site.remove()
        self.groups.remove(site.name)

    def drop_unkept(self) -> None:
        """Removes all seeds that are not kept."""
        for site in self.hooks.sites.values():
            if site.seed is not None and not site.fossil:
                self.remove(site)

    def network_tensors(self, slots: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yields parameters, buffers and optimizer state of the model and of the seeds in ``slots``, by name."""
        optimizer, groups = self.groups.optimizer, self.groups.groups
        seeds = [(name, self.hooks.sites[name].seed, groups[name]["params"]) for name in slots]
        own = [(name, seed, parameters) for name, seed, parameters in seeds if seed is not None]
        for owner, module, parameters in [(HOST, self.hooks.model, self.groups.host), *own]:
            for name, tensor in chain(module.named_parameters(), module.named_buffers()):
                yield f"{owner}.{name}", tensor
            for index, parameter in enumerate(parameters):
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, Tensor):
                        yield f"{owner}.state.{index}.{key}", value

    def discard(self, kept: Collection[str], saved: Collection[str]) -> None:
        """Removes the other seeds, all gradients, and state that the optimizer has made since."""
        for site in self.hooks.sites.values():
            if site.seed is not None and site.name not in kept:
                self.remove(site)
        groups, state = self.groups.groups, self.groups.optimizer.state
        owners = {HOST: self.groups.host} | {name: groups[name]["params"] for name in kept}
        for owner, parameters in owners.items():
            for index, parameter in enumerate(parameters):
                parameter.grad = None
                mine = state.get(parameter, {})
                if any(
                    isinstance(v, Tensor) and f"{owner}.state.{index}.{key}" not in saved for key, v in mine.items()
                ):
                    del state[parameter]

    def not_finite(self) -> float:
        """Returns the number of non-finite values in the model's parameters and buffers and in its kept seeds."""
        seeds = [site.seed for site in self.hooks.sites.values() if site.seed is not None and site.fossil]
        parameters = chain(self.hooks.model.parameters(), *(seed.parameters() for seed in seeds))
        return float(count_not_finite(self.hooks.model, self._finite, parameters))
