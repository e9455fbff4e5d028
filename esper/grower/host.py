"""The model of a loop as a host that can be rolled back."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import chain

from torch import Tensor

from esper.grower.hooks import SiteHooks
from esper.grower.optimizer import SeedGroups
from esper.seeds.site import Role, Site
from esper.training.metrics import HOST, count_not_finite, finite_buffers


class LoopHost:
    """A model with its seeds and the state of their optimizer, for ``esper.training.snapshot``.

    A rollback does not touch what it does not know: learning-rate schedules, the scale of a GradScaler, averages of
    weights, and numbers in the optimizer's state that are not tensors.
    """

    def __init__(self, hooks: SiteHooks, groups: SeedGroups) -> None:
        self.hooks = hooks
        self.groups = groups
        self.epoch = 0
        """Number of epochs since the first :meth:`Grower.step`."""
        self._finite = finite_buffers(hooks.model)

    def assign(
        self,
        site: Site,
        role: Role,
        alpha: float,
        target: float,
        learning: bool,
    ) -> None:
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
        for owner, parameters in self._parameters_of(slots).items():
            module = self.hooks.model if owner == HOST else self.hooks.sites[owner].seed
            if module is None:
                continue
            for name, tensor in chain(module.named_parameters(), module.named_buffers()):
                yield f"{owner}.{name}", tensor
            for index, parameter in enumerate(parameters):
                for key, value in self.groups.optimizer.state.get(parameter, {}).items():
                    if isinstance(value, Tensor):
                        yield f"{owner}.state.{index}.{key}", value

    def _parameters_of(self, slots: Iterable[str]) -> dict[str, list[Tensor]]:
        """Returns the parameters of the model, as those of ``HOST``, and of the seeds in ``slots``."""
        groups = self.groups.groups
        parameters = {HOST: self.groups.host}
        for slot in slots:
            parameters[slot] = groups[slot]["params"]
        return parameters

    def discard(self, kept: Collection[str], saved: Collection[str]) -> None:
        """Removes the other seeds, all gradients, and state that the optimizer has made since."""
        for site in self.hooks.sites.values():
            if site.seed is not None and site.name not in kept:
                self.remove(site)
        state = self.groups.optimizer.state
        for owner, parameters in self._parameters_of(kept).items():
            for index, parameter in enumerate(parameters):
                parameter.grad = None
                for key, value in state.get(parameter, {}).items():
                    if isinstance(value, Tensor) and f"{owner}.state.{index}.{key}" not in saved:
                        del state[parameter]
                        break

    def not_finite(self) -> float:
        """Returns the number of non-finite values in the model's parameters and buffers and in its kept seeds."""
        model = self.hooks.model
        parameters = list(model.parameters())
        for site in self.hooks.sites.values():
            if site.seed is not None and site.fossil:
                parameters.extend(site.seed.parameters())
        return float(count_not_finite(model, self._finite, parameters))
