"""Blueprints that make a transformer deeper: copies of its blocks, and blocks that begin as the identity."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import esper
from esper.core.blueprints import BLUEPRINTS
from esper.core.ramps import STYLES
from esper.core.site import Role, seed_of
from esper.data.task import resolve
from esper.data.tasks import load_task
from esper.files.grown_host import assemble, export, load_host
from esper.hosts.cnn import CNNHost
from esper.hosts.grown import KeptSeed
from esper.hosts.transformer import TransformerHost
from esper.training.host_training import HostTraining
from esper.training.metrics import make_metrics
from esper.training.step import train_epoch
from tests.core_helpers import tiny_config

TOKENS = torch.randint(0, 11, (4, 6))


def host(layers: int = 4, slots: int = 2) -> TransformerHost:
    torch.manual_seed(0)
    return TransformerHost(11, 8, layers=layers, heads=2, block=6, slots=slots)


def with_seed(
    network: TransformerHost, slot: str, name: str, alpha: float = 1.0
) -> torch.Tensor:
    place = next(place for place in network.sites if place.name == slot)
    blueprint = BLUEPRINTS.get("transformer", name)
    seed = seed_of(blueprint, STYLES["GATED_GATE"].operator, place)
    assert sum(p.numel() for p in seed.parameters()) == blueprint.size(place), (
        "it has no gate"
    )

    def hook(site: int, at: Any) -> torch.Tensor:
        return (
            at.h + alpha * seed(at.source) if network.sites[site].name == slot else at.h
        )  # type: ignore[no-any-return]

    with torch.no_grad():
        return network.forward_with_hook(TOKENS, hook)


def after(network: TransformerHost, order: tuple[int, ...]) -> torch.Tensor:
    """The logits of a host that runs its blocks in this order."""
    with torch.no_grad():
        h = network.segments[0][0](TOKENS)  # type: ignore[index]
        for number in order:
            h = network.blocks[number](h)
        return network.segments[-1](h)  # type: ignore[no-any-return]


def test_a_stack_is_all_blocks_twice() -> None:
    network = host()
    wanted = after(network, (0, 1, 2, 3, 0, 1, 2, 3))
    torch.testing.assert_close(with_seed(network, "r0c1", "stack"), wanted)


def test_a_repeat_is_the_group_before_the_place_twice() -> None:
    network = host()
    wanted = after(network, (0, 1, 0, 1, 2, 3))
    torch.testing.assert_close(with_seed(network, "r0c0", "repeat"), wanted)


@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_an_empty_block_changes_no_bit(alpha: float) -> None:
    network = host()
    with torch.no_grad():
        assert torch.equal(with_seed(network, "r0c0", "empty", alpha), network(TOKENS))


def test_each_place_is_offered_what_fits() -> None:
    offered = {
        place.name: BLUEPRINTS.names("transformer", [place]) for place in host().sites
    }
    assert {"repeat", "empty"} < set(offered["r0c0"])
    assert "stack" not in offered["r0c0"]
    assert {"repeat", "empty", "stack"} < set(offered["r0c1"])
    images = CNNHost(1, 10, base=4, blocks=2)
    assert not {"repeat", "empty", "stack"} & set(BLUEPRINTS.names("cnn", images.sites))


def training(optimizer: str, at_once: bool = True) -> HostTraining:
    task = load_task("chars")
    rates = {"sgd": 0.1, "adamw": 0.003}
    tables = {
        "samples_per_epoch": 64,
        "batch_size": 32,
        "optimizer": optimizer,
        "learning_rate": rates[optimizer],
    }
    config = resolve(tiny_config(env={"at_once": at_once}, task=tables), task)
    made = HostTraining(0, task, config, make_metrics(1, torch.device("cpu"))[0])
    made.reset(0, 0)
    return made


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_copy_begins_with_the_weights_and_the_optimizer_state_of_its_originals(
    optimizer: str,
) -> None:
    made = training(optimizer)
    train_epoch(made)
    site = made.sites[-1]
    made.plant(site, BLUEPRINTS.get("transformer", "repeat"), STYLES["LINEAR_ADD"])
    group = made.seed_groups[site.name]
    originals = [p for block in site.place.group for p in block.parameters()]
    assert len(group.parameters) == len(originals) > 0
    for mine, other in zip(group.parameters, originals, strict=True):
        assert torch.equal(mine, other)
        own, theirs = (
            group.optimizer.state[mine],
            made.host_group.optimizer.state[other],
        )
        assert own.keys() == theirs.keys()
        for name, value in theirs.items():
            assert torch.equal(own[name], value), name
            assert own[name] is not value
    assert any(
        bool(value.any())
        for value in group.optimizer.state[group.parameters[0]].values()
    )
    decays = {g["weight_decay"] for g in group.optimizer.param_groups}
    assert decays == {g["weight_decay"] for g in made.host_group.optimizer.param_groups}
    made.assign(site, Role.FOSSIL, 1.0, 1.0, learning=True)
    train_epoch(made)
    assert not torch.equal(group.parameters[0], originals[0]), "it goes its own way"


def test_a_copy_that_is_incubated_has_the_state_too_but_no_decay() -> None:
    made = training("adamw", at_once=False)
    train_epoch(made)
    site = made.sites[-1]
    made.plant(site, BLUEPRINTS.get("transformer", "stack"), STYLES["LINEAR_ADD"])
    group = made.seed_groups[site.name]
    assert {g["weight_decay"] for g in group.optimizer.param_groups} == {0.0}
    assert bool(group.optimizer.state[group.parameters[0]]["exp_avg"].any())


def test_a_deeper_host_is_saved_loaded_and_made_plain(tmp_path: Path) -> None:
    task = load_task("chars")
    kept = {
        "r0c0": KeptSeed("repeat", "LINEAR_ADD", 1.0),
        "r0c1": KeptSeed("stack", "LINEAR_ADD", 1.0),
    }
    blueprints = {
        name: BLUEPRINTS.get("transformer", seed.blueprint)
        for name, seed in kept.items()
    }
    network = assemble(task.new_host(), kept, blueprints, "chars").eval()
    with torch.no_grad():
        for p in network.parameters():
            p.add_(0.01 * torch.randn_like(p))
        wanted = network(task.sample)
        export(network, tmp_path / "host")
        assert torch.equal(load_host(tmp_path / "host")(task.sample), wanted)
        torch.testing.assert_close(
            esper.plain(network, task.sample)(task.sample), wanted
        )
