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

    def __init__(self, model: nn.Module, paths: Mapping[str, SitePath], optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._own = {
            name: [p for part in dict.fromkeys(path.paths) for p in model.get_submodule(part).parameters()]
            for name, path in paths.items()
        }
        self._before = {name: _parameters_before(model, path.sink) for name, path in paths.items()}
        self._layout: list[tuple[Group, int]] = []
        self._found: dict[str, Group] = {}

    def group(self, name: str) -> Group:
        """Returns the group that the seed in slot ``name`` follows."""
        groups = host_groups(self._optimizer)
        if not self._is_layout(groups):
            self._layout = [(group, len(group["params"])) for group in groups]
            self._found.clear()
        if name not in self._found:
            self._found[name] = self._search(name, groups)
        return self._found[name]

    def _is_layout(self, groups: list[Group]) -> bool:
        """Whether the groups are those of the last search, with as many parameters."""
        if len(groups) != len(self._layout):
            return False
        pairs = zip(groups, self._layout, strict=True)
        return all(group is known and len(group["params"]) == size for group, (known, size) in pairs)

    def _search(self, name: str, groups: list[Group]) -> Group:
        index_of = {id(p): index for index, group in enumerate(groups) for p in group["params"]}
        elements: Counter[int] = Counter()
        for p in self._own[name]:
            if id(p) in index_of:
                elements[index_of[id(p)]] += p.numel()
        if elements:
            return groups[elements.most_common(1)[0][0]]
        before = [index_of[id(p)] for p in self._before[name] if id(p) in index_of]
        return groups[before[-1]] if before else groups[0]


def _parameters_before(model: nn.Module, path: str) -> list[Tensor]:
    """Returns the parameters of the modules that come before the submodule at ``path``, in the order of the model."""
    found: dict[int, Tensor] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if name == path:
            break
        for parameter in module.parameters(recurse=False):
            found[id(parameter)] = parameter
    return list(found.values())
