"""Saving a grown host, and building it again from its file: weights as safetensors, topology as JSON."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from esper.config import ConfigError
from esper.data.tasks import load_task
from esper.experiment.files import write_atomic, write_json
from esper.hosts.grown import GrownHost
from esper.seeds.blend import STYLES, Seed
from esper.seeds.blueprints import BLUEPRINTS
from esper.training.env_state import ParallelEnvState
from esper.training.randomness import seeded

FORMAT = 1


@dataclass(frozen=True)
class HostFiles:
    """The two files of a saved host; ``stem`` is their common path without ending."""

    stem: Path

    @property
    def weights(self) -> Path:
        return self.stem.with_name(self.stem.name + ".safetensors")

    @property
    def topology(self) -> Path:
        return self.stem.with_name(self.stem.name + ".json")


def committed_network(training: ParallelEnvState) -> GrownHost:
    """The env's host with its fossils, sharing their parameters; living seeds are left out."""
    fossils = {slot.name: slot for slot in training.fossils()}
    seeds = {name: slot.seed for name, slot in fossils.items() if slot.seed is not None}
    return GrownHost(training.host, seeds, {name: fossils[name].alpha.alpha for name in seeds})


def save_host(training: ParallelEnvState, stem: Path, facts: dict[str, Any]) -> HostFiles:
    """Write the committed network to ``stem.safetensors`` and ``stem.json``; ``facts`` go into the JSON as they are."""
    files = HostFiles(stem)
    network = committed_network(training)
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in network.state_dict().items()}
    slots = {}
    for slot in training.fossils():
        assert slot.blueprint is not None
        assert slot.style is not None
        style = next(name for name, style in STYLES.items() if style == slot.style)
        slots[slot.name] = {"blueprint": slot.blueprint.name, "style": style, "alpha": slot.alpha.alpha}
    content = safetensors.torch.save(weights)
    write_atomic(files.weights, content)
    write_json(
        files.topology,
        {
            "format": FORMAT,
            "task": training.task.name,
            "topology": training.host.topology,
            "host_parameters": training.host_parameters,
            "parameters": sum(p.numel() for p in network.parameters()),
            "slots": slots,
            "weights_sha256": hashlib.sha256(content).hexdigest(),
            **facts,
        },
    )
    return files


def load_host(stem: Path) -> GrownHost:
    """The network saved under ``stem``, in eval mode; no code from the files is run.

    Raises ConfigError for a file that is missing, broken, or of a newer format, naming it.
    """
    files = HostFiles(Path(stem))
    for file in (files.topology, files.weights):
        if not file.is_file():
            raise ConfigError(f"{file} does not exist")
    try:
        network = _rebuild(json.loads(files.topology.read_text(encoding="utf-8")), files.weights.read_bytes())
    except (
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        RuntimeError,
        safetensors.SafetensorError,
    ) as error:
        raise ConfigError(f"{files.stem}: not a host that can be loaded: {error}") from error
    return network.eval()


def _rebuild(facts: dict[str, Any], content: bytes) -> GrownHost:
    if not 1 <= facts["format"] <= FORMAT:
        raise ValueError(f"it has format {facts['format']}; this Esper reads up to {FORMAT}")
    if hashlib.sha256(content).hexdigest() != facts["weights_sha256"]:
        raise ValueError("the weights are not those that the topology was written with")
    with seeded(0):  # every value is overwritten
        host = load_task(facts["task"]).build_host()
        channels = {site.name: site.channels for site in host.sites}
        seeds, alphas = {}, {}
        for name, slot in facts["slots"].items():
            blueprint = BLUEPRINTS.get(facts["topology"], slot["blueprint"])
            body, operator = blueprint.build(channels[name]), STYLES[slot["style"]].operator
            seeds[name] = Seed(body, operator, channels[name], blueprint.topology)
            alphas[name] = float(slot["alpha"])
            if not 0 <= alphas[name] <= 1:
                raise ValueError(f"alpha of {name} is {alphas[name]}, not between 0 and 1")
        network = GrownHost(host, seeds, alphas)
    network.load_state_dict(safetensors.torch.load(content))
    return network


def accuracy(network: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """Accuracy of a network on inputs [N, ...] and targets [N], pp."""
    with torch.inference_mode():
        return 100 * float((network(x).argmax(dim=1) == y).double().mean())
