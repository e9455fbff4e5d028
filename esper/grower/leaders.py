"""Which of an optimizer's groups a seed follows: that of the layer that it sits on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torch import Tensor, nn
from torch.optim import Optimizer

from esper.grower.schedules import Group, host_groups
from esper.hosts.site_path import SitePath


class Leaders:
    """Finds the group that the seed of a slot takes its options and its rate from.

    It is the group that holds most elements of the submodule's parameters, or of those of source and sink; else that of
    the nearest parameter before the sink, in the order of the model; else the first. Groups may be added, moved and
    replaced at any time, as by ``optimizer.load_state_dict``: a parameter tells which one it is.

    Args:
        model: the host.
        paths: where each slot lies, by its name.
        optimizer: the host's.
    """

    def __init__(
        self,
        model: nn.Module,
        paths: Mapping[str, SitePath],
        optimizer: Optimizer,
    ) -> None:
        self._optimizer = optimizer
        self._own: dict[str, list[Tensor]] = {}
        self._before: dict[str, list[Tensor]] = {}
        for name, path in paths.items():
            self._own[name] = []
            for part in dict.fromkeys(path.paths):
                self._own[name].extend(model.get_submodule(part).parameters())
            self._before[name] = _parameters_before(model, path.sink)
        self._groups: list[Group] = []
        self._layout: list[tuple[int, int]] = []
        self._leaders: dict[str, Group] = {}

    def group(self, name: str) -> Group:
        """Returns the group that the seed in slot ``name`` follows."""
        groups = host_groups(self._optimizer)
        layout = [(id(group), len(group["params"])) for group in groups]
        if layout != self._layout:
            self._layout = layout
            self._groups = groups  # no later group gets the id of one that is kept
            self._leaders.clear()
        if name not in self._leaders:
            self._leaders[name] = self._search(name, groups)
        return self._leaders[name]

    def _search(self, name: str, groups: list[Group]) -> Group:
        index_of: dict[Tensor, int] = {}
        for index, group in enumerate(groups):
            index_of |= dict.fromkeys(group["params"], index)
        elements = Counter[int]()
        for parameter in self._own[name]:
            if parameter in index_of:
                elements[index_of[parameter]] += parameter.numel()
        if elements:
            return groups[max(elements, key=elements.__getitem__)]
        for parameter in reversed(self._before[name]):
            if parameter in index_of:
                return groups[index_of[parameter]]
        return groups[0]


def _parameters_before(model: nn.Module, path: str) -> list[Tensor]:
    """Returns the parameters of the modules that come before the submodule at ``path``, in the order of the model."""
    before: dict[Tensor, None] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if name == path:
            break
        before |= dict.fromkeys(module.parameters(recurse=False))
    return list(before)
