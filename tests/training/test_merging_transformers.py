"""Transformers take up heads, hidden units, LoRAs and blocks while they train."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from esper.core.blueprints import BLUEPRINTS
from esper.core.site import Role
from esper.core.stage import SeedStage as S
from esper.data.task import resolve
from esper.files.grown_host import committed_network, export, load_host
from esper.hosts.transformer import TransformerHost
from esper.training.host_state import host_state, load_host_state
from esper.training.host_training import HostTraining
from esper.training.merging import merge_fossils, release, removable_units
from esper.training.metrics import make_metrics
from esper.training.native import NativePasses
from tests.core_helpers import plant, tiny_config, train
from tests.training.growing import text
from tests.training.test_merging import require_same, state_of


def training_of(native: bool = False, **task: Any) -> HostTraining:
    whole = text()
    options = {"batch_size": 25, "samples_per_epoch": 50, "learning_rate": 0.05}
    env = {"slots": ["all"], "at_once": True}
    config = tiny_config(horizon=100, env=env, task={**options, **task})
    training = HostTraining(
        0, whole, resolve(config, whole), make_metrics(1, torch.device("cpu"))[0]
    )
    if native:
        training.native = NativePasses(training)
    training.reset(0, 0)
    return training


def host_of(training: HostTraining) -> TransformerHost:
    assert isinstance(training.host, TransformerHost)
    return training.host


def outputs(training: HostTraining) -> Tensor:
    """Of the host with its fossils."""
    x = training.task.validation.inputs(0, 40)

    def hook(number: int, at: Any) -> Tensor:
        site = training.sites[number]
        if site.seed is None or not site.on:
            return at.h  # type: ignore[no-any-return]
        return at.h + site.alpha * site.seed.eval()(at.source)  # type: ignore[no-any-return]

    with torch.no_grad():
        return training.host.eval().forward_with_hook(x, hook)


def merge(training: HostTraining, slot: str, blueprint: str) -> None:
    plant(training, slot, blueprint, stage=S.FOSSILIZED)
    train(training, 2)
    wanted = outputs(training)
    assert merge_fossils(training, [slot]) == {}
    assert training.site_by_name[slot].seed is None
    torch.testing.assert_close(outputs(training), wanted, rtol=1e-4, atol=1e-5)


def again(training: HostTraining, native: bool = False, **task: Any) -> HostTraining:
    other = training_of(native, **task)
    load_host_state(other, host_state(training), BLUEPRINTS)
    for one, site in zip(other.sites, training.sites, strict=True):
        other.assign(one, site.role, site.alpha, site.target, site.learning)
    return other


@pytest.mark.parametrize(("optimizer", "native"), [("sgd", True), ("adamw", False)])
def test_a_transformer_grows_in_heads_units_weights_and_blocks(
    optimizer: str, native: bool
) -> None:
    task = {"optimizer": optimizer, "learning_rate": 0.003}
    training = training_of(native, **task)
    names = training.host.slot_names
    host = host_of(training)
    merge(training, "r2c0", "widen_whole")
    assert host.blocks[0].attention.heads == 4
    assert training.site_by_name["r3c0"].place.channels == 48
    merge(training, "r1c0", "widen_half")
    assert host.blocks[0].mlp[0].out_features == 48  # type: ignore[union-attr]
    merge(training, "r3c0", "lora_2")
    merge(training, "r0c0", "repeat")
    assert len(host.blocks) == 3
    assert host.blocks[1].attention.heads == 4
    assert training.site_by_name["r1c0"].place.layers[0] is host.blocks[0].mlp[0]
    merge(training, "r0c1", "stack")
    assert len(host.blocks) == 6
    merge(training, "r0c0", "empty")
    assert len(host.blocks) == 7
    assert host.slot_names == names
    merge(training, "r2c0", "widen_half")
    made = again(training, native, **task)
    assert made.growths == training.growths
    train(training, 3)
    train(made, 3)
    require_same(training, made)
    if native:
        assert training.native is not None
        assert not training.native.reasons
    made.reset(0, 0)
    assert len(host_of(made).blocks) == 2
    assert state_of(made).keys() == state_of(training_of(native, **task)).keys()


@pytest.mark.parametrize("native", [False, True])
def test_heads_are_taken_out_again(native: bool) -> None:
    training = training_of(native, optimizer="adamw", learning_rate=0.003)
    merge(training, "r2c0", "widen_whole")
    merge(training, "r2c0", "widen_half")
    assert removable_units(training, "r2c0") == 2
    train(training, 2)
    wanted = outputs(training)
    release(training, "r2c0", BLUEPRINTS)
    site = training.site_by_name["r2c0"]
    training.assign(site, Role.BLENDED, 1.0, 1.0, learning=False)
    assert host_of(training).blocks[0].attention.heads == 4
    torch.testing.assert_close(outputs(training), wanted, rtol=1e-4, atol=1e-5)
    made = again(training, native, optimizer="adamw", learning_rate=0.003)
    train(training)
    train(made)
    require_same(training, made)
    training.remove(site)
    release(training, "r2c0", BLUEPRINTS)
    training.remove(site)
    assert host_of(training).blocks[0].attention.heads == 2
    train(training)


@pytest.mark.parametrize("stage", [S.GERMINATED, S.TRAINING, S.FOSSILIZED])
def test_a_lora_of_projections_gets_outputs_for_new_heads(stage: S) -> None:
    training = training_of(optimizer="adamw", learning_rate=0.003)
    site = plant(training, "r3c0", "lora_2", stage=stage)
    merge(training, "r2c0", "widen_half")
    made = again(training, optimizer="adamw", learning_rate=0.003)
    train(training)
    train(made)
    require_same(training, made)
    training.assign(site, Role.FOSSIL, 1.0, 1.0, True)
    train(training)
    wanted = outputs(training)
    assert merge_fossils(training, ["r3c0"]) == {}
    torch.testing.assert_close(outputs(training), wanted, rtol=1e-4, atol=1e-5)


def test_moments_of_a_new_block_are_those_that_its_seed_had() -> None:
    training = training_of()
    site = plant(training, "r0c0", "repeat", stage=S.FOSSILIZED)
    train(training, 2)
    assert site.seed is not None
    group = training.seed_groups["r0c0"]
    wanted = [
        group.optimizer.state[parameter]["momentum_buffer"].clone()
        for parameter in site.seed.body.parameters()
    ]
    assert merge_fossils(training, ["r0c0"]) == {}
    state = training.host_group.optimizer.state
    block = host_of(training).blocks[1]
    found = [state[parameter]["momentum_buffer"] for parameter in block.parameters()]
    assert any(value.any() for value in wanted)
    assert all(map(torch.equal, found, wanted))
    plant(training, "r0c0", "repeat", stage=S.FOSSILIZED)
    assert all(map(torch.equal, found, wanted)), "memory of the seed is used again"


def test_a_deeper_host_is_saved_and_loaded(tmp_path: Path) -> None:
    training = training_of()
    merge(training, "r2c1", "widen_whole")
    merge(training, "r0c0", "repeat")
    plant(training, "r0c0", "lora", stage=S.FOSSILIZED)
    network = committed_network(training)
    x = training.task.validation.inputs(0, 20)
    export(network, tmp_path / "host")
    build = partial(training.task.new_host, ("all",))
    loaded = load_host(tmp_path / "host", model=build())
    assert torch.equal(loaded(x), network(x))
    wanted = outputs(training)[:20]
    torch.testing.assert_close(network(x), wanted, rtol=1e-4, atol=1e-5)
