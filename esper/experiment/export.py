"""Saving a grown host, and building it again from its file: weights as safetensors, topology as JSON."""

from __future__ import annotations

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

FORMAT = 1


@dataclass(frozen=True)
class HostFiles:
    """The two files of a saved host; ``stem`` is their common path without ending."""

    stem: Path

    @property
    def weights(self) -> Path:
        return self.stem.with_suffix(".safetensors")

    @property
    def topology(self) -> Path:
        return self.stem.with_suffix(".json")


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
    write_atomic(files.weights, safetensors.torch.save(weights))
    write_json(
        files.topology,
        {
            "format": FORMAT,
            "task": training.task.name,
            "topology": training.host.topology,
            "host_parameters": training.host_parameters,
            "parameters": sum(p.numel() for p in network.parameters()),
            "slots": slots,
            **facts,
        },
    )
    return files


def load_host(stem: Path) -> GrownHost:
    """The network saved under ``stem``, in eval mode; no code from the files is run.

    Raises ConfigError for a file that is missing, broken, or of a newer format, naming it.
    """
    files = HostFiles(stem)
    try:
        facts = json.loads(files.topology.read_text(encoding="utf-8"))
        weights = safetensors.torch.load_file(files.weights)
        if facts["format"] > FORMAT:
            raise ConfigError(f"{files.topology} has format {facts['format']}; this Esper reads up to {FORMAT}")
        host = load_task(facts["task"]).build_host()
        channels = {site.name: site.channels for site in host.sites}
        seeds = {}
        for name, slot in facts["slots"].items():
            blueprint = BLUEPRINTS.get(facts["topology"], slot["blueprint"])
            seeds[name] = Seed(blueprint.build(channels[name]), STYLES[slot["style"]].operator, channels[name])
        network = GrownHost(host, seeds, {name: float(slot["alpha"]) for name, slot in facts["slots"].items()})
        network.load_state_dict(weights)
    except FileNotFoundError as error:
        raise ConfigError(f"{error.filename} does not exist") from None
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, safetensors.SafetensorError) as error:
        raise ConfigError(f"{files.stem}: not a host that can be loaded: {type(error).__name__}: {error}") from error
    return network.eval()


def accuracy(network: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """Accuracy of a network on inputs [N, ...] and targets [N], pp."""
    with torch.inference_mode():
        return 100 * float((network(x).argmax(dim=1) == y).double().mean())
