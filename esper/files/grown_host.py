"""Saving a grown host and rebuilding it from its files: weights as safetensors, topology as JSON."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import safetensors.torch
import torch
from torch import nn

from esper.config import ConfigError
from esper.core.blueprints import BLUEPRINTS, Blueprint, BlueprintRegistry
from esper.core.ramps import STYLES
from esper.core.site import seed_of
from esper.data.objective import PAD
from esper.data.split import Split
from esper.data.tasks import build_host
from esper.data.user_code import is_user_task
from esper.errors import MISFITS
from esper.files.atomic import given_path, json_bytes, write_together
from esper.hosts.graft import GraftedHost, graft
from esper.hosts.grown import GrownHost, KeptSeed
from esper.hosts.host import Host
from esper.hosts.inputs import call, logits_of
from esper.hosts.layout import FOUND, Layout
from esper.hosts.widen import resize, shapes_of
from esper.training.host_training import HostTraining
from esper.training.rng import seeded

FORMAT = 2


@dataclass(frozen=True)
class HostFiles:
    """The two files of a saved host; ``stem`` is their common path without the suffix."""

    stem: Path

    @property
    def weights(self) -> Path:
        return self.stem.with_name(self.stem.name + ".safetensors")

    @property
    def topology(self) -> Path:
        return self.stem.with_name(self.stem.name + ".json")


def committed_network(training: HostTraining) -> GrownHost:
    """Returns a copy of the env's host with its fossils as an independent network, in eval mode.

    Living seeds are left out.
    """
    task = training.task
    fossils = training.fossils()
    kept = {}
    blueprints = {}
    for name, seed in fossils.items():
        alpha = training.site_by_name[name].alpha
        kept[name] = KeptSeed(
            seed.blueprint.name,
            seed.style.name,
            alpha,
            seed.module.leading,
        )
        blueprints[name] = seed.blueprint
    with seeded(0):  # all weights are overwritten
        host = task.new_host(training.host.slot_names)
        host.probe(task.sample.cpu())
        first = shapes_of(host)
        if resize(host, shapes_of(training.host)):
            host.follow_layers(task.sample.cpu())
        now = shapes_of(host)
        network = assemble(host, kept, blueprints, task.name)
        network.first_shapes = {name: shape for name, shape in first.items() if shape != now[name]}
    _copy(training.host, network.host)
    for name, seed in fossils.items():
        _copy(seed.module, network.seeds[name])
    network.eval()
    return network


@torch.no_grad()
def _copy(source: nn.Module, target: nn.Module) -> None:
    """Gives ``target`` the weights of ``source``, and its buffers, also those that its state lacks."""
    state = source.state_dict()
    _match_precision(target, state.values())
    target.load_state_dict(state)
    for copied, buffer in zip(target.buffers(), source.buffers(), strict=True):
        copied.copy_(buffer)


def assemble(
    host: Host,
    kept: Mapping[str, KeptSeed],
    blueprints: Mapping[str, Blueprint],
    task: str,
) -> GrownHost:
    """Adds fresh seeds to ``host``, whose sites must be known; ``blueprints`` are by slot.

    Initial weights are drawn from torch's global generator.
    """
    places = {site.name: site for site in host.sites}
    # The order of random draws is that of the slots in ``kept``.
    seeds = {}
    for name, seed in kept.items():
        operator = STYLES[seed.style].operator
        seeds[name] = seed_of(
            blueprints[name],
            operator,
            places[name],
            seed.leading,
        )
    return GrownHost(host, seeds, kept, task)


def export(network: GrownHost, stem: Path | str, facts: Mapping[str, Any] = MappingProxyType({})) -> HostFiles:
    """Saves ``network`` for :func:`load_host`: weights as ``stem.safetensors``, topology as ``stem.json``.

    ``facts`` are added to the JSON unchanged. Existing files are replaced.
    """
    files = HostFiles(given_path(stem))
    files.stem.parent.mkdir(parents=True, exist_ok=True)
    host = network.host
    paths = None
    between: Mapping[str, Any] = {}
    if isinstance(host, GraftedHost):
        paths = host.paths
        between = host.between
    sites = {}
    layouts = {}
    for site in host.sites:
        sites[site.name] = site.channels
        if site.topology:  # else that of the host
            layouts[site.name] = (site.topology, site.order)
    # Separate copies: safetensors refuses tied weights, and loading writes both copies to the same tensor.
    weights = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in network.state_dict().items()}
    content = safetensors.torch.save(weights)
    topology = json_bytes(
        {
            "format": FORMAT,
            "task": network.task,
            "topology": host.topology,
            "sites": sites,
            "grafted": paths,
            "between": between,
            "layouts": layouts,
            "host_parameters": host.parameter_count,
            "parameters": sum(p.numel() for p in network.parameters()),
            "first_shapes": dict(network.first_shapes),
            "slots": {name: asdict(seed) for name, seed in network.kept.items()},
            "weights_sha256": hashlib.sha256(content).hexdigest(),
            **facts,
        }
    )
    write_together({files.weights: content, files.topology: topology})
    return files


def load_host(
    stem: Path | str,
    model: nn.Module | None = None,
    blueprints: BlueprintRegistry = BLUEPRINTS,
) -> GrownHost:
    """Returns the network saved under ``stem``, in eval mode; no code from the files is executed.

    Args:
        stem: path of the two files without their suffix.
        model: the network that it was grown from, unless it is the host of a known task: a host, or what was passed to
            ``esper.graft``. It is used without copying, and receives the saved weights.
        blueprints: registry that its seeds are built from.

    Raises:
        ConfigError: a file is missing, broken or of another format (the message names it), or the model is missing or
            differs from the original.
    """
    files = HostFiles(given_path(stem))
    for file in (files.topology, files.weights):
        if not file.is_file():
            raise ConfigError(f"{file} does not exist")
    try:
        facts = json.loads(files.topology.read_text(encoding="utf-8"))
        network = _rebuild(facts, files.weights.read_bytes(), model, blueprints)
        network.eval()
        return network
    except (*MISFITS, OSError, safetensors.SafetensorError) as error:
        raise ConfigError(f"{stem}: this host cannot be loaded: {error}") from error


def _rebuild(
    facts: dict[str, Any],
    content: bytes,
    model: nn.Module | None,
    blueprints: BlueprintRegistry,
) -> GrownHost:
    """Returns the network of a topology file and the ``content`` of its file of weights."""
    if facts["format"] != FORMAT:
        raise ValueError(f"it has format {facts['format']}, but this version of Esper reads format {FORMAT}")
    if hashlib.sha256(content).hexdigest() != facts["weights_sha256"]:
        raise ValueError("the weights do not match the checksum in the topology file")
    kept = {name: KeptSeed(**slot) for name, slot in facts["slots"].items()}
    layouts = {}
    for name, (topology, order) in facts.get("layouts", {}).items():
        layouts[name] = Layout(topology, tuple(order))
    recipes = {}
    for name, seed in kept.items():
        topology = layouts[name].topology if name in layouts else facts["topology"]
        recipes[name] = blueprints.get(topology, seed.blueprint)
    sites = facts["sites"]
    sizes = [recipe.parameters(int(sites[name])) for name, recipe in recipes.items() if not recipe.only_added]
    if sum(sizes) > len(content):
        raise ValueError("its seeds are larger than the file of weights")  # they might not fit into memory
    with seeded(0):  # all weights are overwritten
        host = _host_of(facts, model, layouts)
        weights = safetensors.torch.load(content)
        first = {}
        for name, shape in facts.get("first_shapes", {}).items():
            first[name] = tuple(shape)
        _widen(host, first, weights)
        network = assemble(host, kept, recipes, facts["task"])
        network.first_shapes = first
    for name, module in network.seeds.items():
        prefix = f"seeds.{name}."
        _match_precision(module, (tensor for key, tensor in weights.items() if key.startswith(prefix)))
    network.load_state_dict(weights)
    return network


def _widen(
    host: Host,
    first: Mapping[str, tuple[int, ...]],
    weights: Mapping[str, torch.Tensor],
) -> None:
    """Gives the layers of ``host`` that had other shapes at ``first`` those of ``weights``.

    Raises ValueError if it is another host.
    """
    shapes = shapes_of(host)
    wider = {}
    for name, shape in first.items():
        found = shapes.get(name)
        if found != shape:
            raise ValueError(f"size mismatch: {name} of its host was {shape} at first, and that of model= is {found}")
        wider[name] = weights[f"host.{name}"].shape
    for key, tensor in weights.items():  # blocks that it has got since
        name = key.removeprefix("host.")
        if name != key and name not in shapes:
            wider[name] = tensor.shape
    if resize(host, wider):
        host.follow_layers()


def _match_precision(module: nn.Module, weights: Iterable[torch.Tensor]) -> None:
    """Converts the module to double precision if ``weights`` contain float64, so that they load unchanged."""
    if any(tensor.dtype == torch.float64 for tensor in weights):
        module.double()


def _host_of(facts: dict[str, Any], model: nn.Module | None, layouts: Mapping[str, Layout]) -> Host:
    """Returns the host without seeds. No forward pass is needed: the order and channels of its sites were saved."""
    if isinstance(model, GrownHost):
        raise ValueError("model= is a host with seeds: pass the host that it was grown from")
    if isinstance(model, Host):
        host = model
        _use_saved_slots(host, facts)
    elif facts["grafted"] is not None:
        if model is None:
            raise ValueError("it was grown from a user-defined model: pass a model of the same architecture as model=")
        topology = None if facts["topology"] == FOUND else facts["topology"]
        host = graft(model, facts["grafted"], topology)
    else:
        if model is not None:
            raise ValueError(
                f"its host is not a grafted model: omit model=, or pass a host like that of task {facts['task']}"
            )
        if is_user_task(facts["task"]):
            raise ValueError(f"its host is built by the user-defined task {facts['task']}: pass such a host as model=")
        host = build_host(facts["task"], trusted=False)
        host.use_slots(tuple(facts["sites"]))
    if isinstance(host, GraftedHost):
        widths = {name: int(channels) for name, channels in facts["sites"].items()}
        host.take_sites(widths, facts.get("between", {}), layouts)
    return host


def _use_saved_slots(host: Host, facts: dict[str, Any]) -> None:
    """Uses the slots of the saved host. Raises ValueError if ``host`` has others, or another topology."""
    slots = tuple(facts["sites"])
    if set(slots) <= set(host.possible_slots):
        host.use_slots(slots)
    paths = host.paths if isinstance(host, GraftedHost) else None
    same_topology = host.topology == facts["topology"] and paths == facts["grafted"]
    if not same_topology or set(host.slot_names) != set(slots):
        raise ValueError(
            f"model= has {host.topology} slots {paths or host.slot_names}, but the saved host was grown with "
            f"{facts['topology']} slots {facts['grafted'] or slots}"
        )


def accuracy(network: nn.Module, x: Any, y: torch.Tensor, batch: int = 2500) -> float:
    """Returns the accuracy of ``network`` on inputs x [N, ...] and targets y [N] or [N, T], in pp.

    Inputs may be a dict or a tuple of tensors, as in a ``Split``. ``batch`` is the max number of samples per forward
    pass.
    """
    split = Split(x, y)
    hits = 0
    with torch.inference_mode():
        for first in range(0, len(y), batch):
            end = first + batch
            logits = logits_of(call(network, split.inputs(first, end)))
            hits += int((logits.argmax(dim=-1) == y[first:end]).sum())
    return 100 * hits / int((y != PAD).sum())
