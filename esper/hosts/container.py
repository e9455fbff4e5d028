"""Where seeds are registered: kept ones in a container in the submodule that they add to, growing ones nowhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from esper.config import ConfigError
from esper.core.blend import CONTAINER as CONTAINER
from esper.core.blend import GROWING as GROWING

NOT_SCRIPTED = (
    "torch.jit.script cannot compile seeds, which hooks add: use torch.export or torch.jit.trace for what "
    "grower.finish() returns, or script a network whose seeds have all become a part of its layers, by merge=True"
)


class GrownSeeds(nn.Module):
    """Container of the kept seeds of a submodule, by name."""

    def __prepare_scriptable__(self) -> None:
        """Is called by ``torch.jit.script``. Raises ConfigError."""
        raise ConfigError(NOT_SCRIPTED)

    def forward(self, x: Any, *_more: Any) -> Any:
        """Returns ``x``: a network may run all children of a module in turn."""
        return x


class GrowingHook(Protocol):
    """A hook with a seed that grows."""

    name: str

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a copy of the hook has: the ``seed`` that is on, if any."""


class GrowingSeeds(dict[str, GrowingHook]):
    """The hooks of the seeds that grow at a submodule, by name, as an attribute of it.

    Whatever lists a network's children, parameters or state finds none of them. In copies and pickles of the submodule,
    those that are on are ordinary submodules.

    Args:
        modules: the dict in which the submodule registers its children.
    """

    def __init__(self, modules: dict[str, Any]) -> None:
        super().__init__()
        self.modules = modules

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        seeds = {}
        for name, hook in self.items():
            seed = hook.__getstate__()["seed"]
            if seed is not None:
                seeds[name] = seed
        # A copy of the submodule has a copy of this dict by now: attributes are copied in their order.
        return _register, (self.modules, seeds, list(self.values()))


def _register(
    modules: dict[str, Any],
    seeds: Mapping[str, nn.Module],
    hooks: list[GrowingHook],
) -> list[GrowingHook]:
    """Registers ``seeds`` among the children ``modules`` of a copy; returns its ``hooks``, of which some may rest."""
    if seeds:
        container = modules.setdefault(CONTAINER, GrownSeeds())
        for name, seed in seeds.items():
            container.add_module(name, seed)
    return hooks


def forget_copied(network: nn.Module) -> list[GrowingHook]:
    """Takes from ``network``, a copy, the list of the hooks that it had when it was made, and returns these."""
    hooks: list[GrowingHook] = []
    for module in network.modules():
        held = vars(module).get(GROWING)
        if isinstance(held, list):
            hooks += held
            del vars(module)[GROWING]
    return hooks


def own_children(module: nn.Module) -> dict[str, nn.Module]:
    """Returns the submodules of ``module`` by name, without those that may stand in any layer: the container of seeds,
    and the parametrizations that compute its weights."""
    children = {name: child for name, child in module.named_children() if not isinstance(child, GrownSeeds)}
    if is_parametrized(module):
        children.pop("parametrizations")
    return children


def home_of(model: nn.Module, sink: str) -> str:
    """Returns the path of the submodule that holds the seeds at the submodule ``sink`` of ``model``.

    It is the sink itself, so that seeds go where the sink goes: into slices, copies, and its own state. If one child
    has all parameters, as in a LightningModule around a network, it is that child. A Sequential would run the container
    or count it as one of its items; there it is the last item that the model uses no more often.
    """
    uses = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    path = sink
    home = model.get_submodule(sink)
    while True:
        children = own_children(home)
        if isinstance(home, nn.Sequential | nn.ModuleList | nn.ModuleDict) and children:
            single = [name for name, child in children.items() if uses[child] == uses[home]]
            name = (single or list(children))[-1]
        else:
            owners = [name for name, child in children.items() if next(child.parameters(), None) is not None]
            if len(owners) != 1 or next(home.parameters(recurse=False), None) is not None:
                return path
            name = owners[0]
        path = f"{path}.{name}" if path else name
        home = children[name]


def container_of(model: nn.Module, sink: str) -> GrownSeeds:
    """Returns the container of seeds at the submodule ``sink`` of ``model``; makes it if it is missing."""
    home = model.get_submodule(home_of(model, sink))
    container = home._modules.get(CONTAINER)
    if not isinstance(container, GrownSeeds):
        container = GrownSeeds()
        home.add_module(CONTAINER, container)
    return container


def containers_in(model: nn.Module) -> Iterator[tuple[nn.Module, GrownSeeds]]:
    """Yields the containers of kept seeds in ``model``, each with the submodule that holds it."""
    for module in list(model.modules()):
        container = module._modules.get(CONTAINER)
        if isinstance(container, GrownSeeds):
            yield module, container


def hold(model: nn.Module, sink: str, hook: GrowingHook) -> None:
    """Lets copies of the submodule ``sink`` register the seed of ``hook`` while it grows."""
    home = model.get_submodule(home_of(model, sink))
    if not isinstance(vars(home).get(GROWING), GrowingSeeds):  # a copy has a list
        vars(home)[GROWING] = GrowingSeeds(home._modules)
    vars(home)[GROWING][hook.name] = hook


def release(model: nn.Module, hook: GrowingHook) -> None:
    """Ends what :func:`hold` began."""
    for module in model.modules():
        growing = vars(module).get(GROWING)
        if not isinstance(growing, GrowingSeeds) or growing.get(hook.name) is not hook:
            continue
        del growing[hook.name]
        if not growing:
            del vars(module)[GROWING]


def unregister_seed(model: nn.Module, seed: nn.Module | None) -> None:
    """Takes a kept seed out of its container in ``model``, and the container out of its submodule once it is empty."""
    for home, container in containers_in(model):
        for name, child in list(container.named_children()):
            if child is seed:
                del container._modules[name]
        if not container._modules:
            del home._modules[CONTAINER]


REPLACED = {"BaseTunerLayer", "AuxiliaryTrainingWrapper", "ModulesToSaveWrapper"}
"""Classes of PEFT's layers, which stand in the place of others for a while."""


def require_stays(where: str, module: nn.Module) -> None:
    """Raises ConfigError for a ``module`` that a library replaces by another one later, without its seeds, and for one
    that computes a weight of a layer."""
    kind = type(module)
    if isinstance(module, ParametrizationList):
        raise ConfigError(f"{where} computes a weight of a layer, as weight_norm does: name the layer itself")
    if REPLACED.intersection(ancestor.__name__ for ancestor in kind.__mro__):
        raise ConfigError(
            f"{where} lies in a {kind.__name__} of {kind.__module__.partition('.')[0]}, which merge_and_unload() "
            "replaces by another layer: name the submodule around it"
        )


def network_of(average: nn.Module, model: nn.Module) -> nn.Module:
    """Returns the network of an average of the weights of ``model``: inside ``AveragedModel``, or a copy of the model.

    Raises ConfigError for an average of another network.
    """
    if not isinstance(average, nn.Module):
        raise ConfigError(
            f"averages= has a {type(average).__name__}, which is no module, so that seeds cannot be a part of it: pass "
            "averages such as torch.optim.swa_utils.AveragedModel(model), or average what grower.finish() returns"
        )
    for network in (average, average._modules.get("module")):
        if type(network) is type(model) and network is not None and _shapes(network) == _shapes(model):
            return network
    raise ConfigError(
        "averages= has a network whose parameters are not those of the model: pass the averages of this model, such as "
        "torch.optim.swa_utils.AveragedModel(model), or copies of it"
    )


def _shapes(network: nn.Module) -> dict[str, torch.Size | None]:
    """Returns the shapes of the parameters by name, without those of seeds; None for a lazy one."""
    shapes = {}
    for name, parameter in network.named_parameters():
        lazy = isinstance(parameter, nn.parameter.UninitializedParameter)
        if CONTAINER not in name.split("."):
            shapes[name] = None if lazy else parameter.shape
    return shapes
