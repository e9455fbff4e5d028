"""LoRAs of frozen layers become a part of the layers' adapters, whose rank grows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import esper
from esper.core.blueprints import BLUEPRINTS
from esper.core.blueprints.adapted import AdaptedLinear, adapt, rank_of
from esper.core.site import Role
from esper.core.stage import SeedStage as S
from esper.files.grown_host import committed_network, export, load_host
from esper.hosts.graft import GraftedHost, graft
from esper.hosts.widen import redraw
from esper.training.host_state import host_state, load_host_state
from esper.training.host_training import HostTraining
from esper.training.merging import merge_fossils
from esper.training.snapshot import Snapshot, ValidationRecord
from tests.core_helpers import plant, train
from tests.hosts.grown_modules import KINDS, Kind, conv1d
from tests.training.test_merging import Mlp, require_same, state_of
from tests.training.test_merging import training_of as graft_training
from tests.training.test_merging_transformers import (
    again,
    host_of,
    merge,
    outputs,
    training_of,
)

FROZEN = {"freeze": "body", "optimizer": "adamw", "learning_rate": 0.003}


def layer_of(training: HostTraining, block: int = 0) -> nn.Linear:
    return host_of(training).blocks[block].attention.query_key_value


def raise_rank(training: HostTraining, slot: str = "r3c0") -> None:
    merge(training, slot, "lora_2")


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_rank_of_a_frozen_layer_grows_in_one_slot(
    optimizer: str, native: bool
) -> None:
    task = {**FROZEN, "optimizer": optimizer}
    training = training_of(native, **task)
    frozen = {
        name: p.clone()
        for name, p in training.host.named_parameters()
        if not p.requires_grad
    }
    size = training.host.parameter_count
    for rank in (2, 4, 6):
        raise_rank(training)
        assert rank_of(layer_of(training)) == rank
        inputs, outs = layer_of(training).in_features, layer_of(training).out_features
        assert training.host.parameter_count == size + rank * (inputs + outs)
    assert rank_of(layer_of(training, 1)) == 0
    before = state_of(training)
    made = again(training, native, **task)
    train(training, 2)
    train(made, 2)
    require_same(training, made)
    after = dict(training.host.named_parameters())
    for name, value in frozen.items():
        assert torch.equal(after[name], value), name
    changed = [
        name for name, p in after.items() if not torch.equal(p, before[f"host.{name}"])
    ]
    assert {name for name in changed if "adapter" in name} == {
        name for name in after if "adapter" in name
    }
    if native:
        assert training.native is not None
        assert not training.native.reasons
    made.reset(0, 0)
    assert type(layer_of(made)) is nn.Linear
    assert state_of(made).keys() == state_of(training_of(native, **task)).keys()


@pytest.mark.parametrize(
    ("optimizer", "ranks_before"), [("sgd", 0), ("sgd", 1), ("adamw", 0)]
)
def test_the_update_after_a_merge_is_that_of_the_unmerged_pair(
    optimizer: str, ranks_before: int
) -> None:
    pair = []
    for _ in range(2):
        training = training_of(
            samples_per_epoch=25, **{**FROZEN, "optimizer": optimizer}
        )  # a step
        for _ in range(ranks_before):
            raise_rank(training)
        plant(training, "r3c0", "lora_2", stage=S.FOSSILIZED)
        train(training, 3)
        pair.append(training)
    merged, apart = pair
    seed = apart.site_by_name["r3c0"].seed
    assert seed is not None
    assert merge_fossils(merged, ["r3c0"]) == {}
    train(merged)
    train(apart)
    torch.testing.assert_close(outputs(merged), outputs(apart))
    layer = layer_of(merged)
    assert isinstance(layer, AdaptedLinear)
    first = 2 * ranks_before
    down, up = layer.adapter
    torch.testing.assert_close(down.weight[first:], seed.body[0].weight)
    torch.testing.assert_close(up.weight[:, first:], seed.body[1].weight)


def test_averages_of_a_merged_seed_are_of_as_many_steps_as_the_adapter() -> None:
    training = training_of(**FROZEN)
    raise_rank(training)
    train(training, 3)
    site = plant(training, "r3c0", "lora_2", stage=S.FOSSILIZED)
    train(training, 2)
    assert site.seed is not None
    group = training.seed_groups["r3c0"].optimizer
    of_seed = group.state[site.seed.body[0].weight]
    beta = group.param_groups[0]["betas"][0]
    assert merge_fossils(training, ["r3c0"]) == {}
    layer = layer_of(training)
    assert isinstance(layer, AdaptedLinear)
    state = training.host_group.optimizer.state[layer.adapter[0].weight]
    assert int(state["step"]) > int(of_seed["step"])
    factor = (1 - beta ** int(state["step"])) / (1 - beta ** int(of_seed["step"]))
    torch.testing.assert_close(state["exp_avg"][2:], factor * of_seed["exp_avg"])


@pytest.mark.parametrize("kind", KINDS)
def test_the_rank_of_a_layer_of_a_grafted_network_grows(
    kind: Kind,
) -> None:
    def build() -> GraftedHost:
        sites = {"r3c0": "fc1 -> fc1"}
        network = Mlp()
        network.fc1 = kind(network.fc1)
        return graft(network, sites, topology="mlp", example=torch.zeros(2, 1, 8, 8))

    training = graft_training(build, freeze="body")
    for rank in (2, 4, 6):
        site = plant(training, "r3c0", "lora_2", stage=S.FOSSILIZED)
        train(training, 2)
        assert merge_fossils(training, ["r3c0"]) == {}
        assert not site.place.obstacle
        assert rank_of(site.place.layers[0]) == rank
    made = graft_training(build, freeze="body")
    load_host_state(made, host_state(training), BLUEPRINTS)
    train(training, 2)
    train(made, 2)
    require_same(training, made)


def test_a_rollback_returns_to_the_rank_of_its_snapshot() -> None:
    training = training_of(**FROZEN)
    raise_rank(training)
    train(training)
    snapshot = Snapshot()
    snapshot.save(training, ValidationRecord(0.0, 0.0, 0.0, 0.0), {})
    before = state_of(training)
    raise_rank(training)
    raise_rank(training, "r3c1")
    snapshot.restore(training)
    assert rank_of(layer_of(training)) == 2
    assert rank_of(layer_of(training, 1)) == 0
    after = state_of(training)
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
    train(training)


def test_an_adapter_is_saved_loaded_and_exported_as_ordinary_weights(
    tmp_path: Path,
) -> None:
    training = training_of(**FROZEN)
    raise_rank(training)
    raise_rank(training)
    plant(training, "r3c0", "lora_8", stage=S.FOSSILIZED)
    training.assign(training.site_by_name["r3c0"], Role.FOSSIL, 1.0, 1.0, True)
    x = training.task.validation.inputs(0, 20)
    wanted = outputs(training)[:20]
    network = committed_network(training)
    torch.testing.assert_close(network(x), wanted)
    export(network, tmp_path / "host")
    fresh = training.task.new_host(training.host.slot_names)
    loaded = load_host(tmp_path / "host", model=fresh)
    torch.testing.assert_close(loaded(x), wanted)
    plain = esper.plain(loaded, x, merge=True)
    torch.testing.assert_close(plain(x), wanted, rtol=1e-4, atol=1e-5)
    assert not any(
        type(module).__module__.startswith("esper.") for module in plain.modules()
    )
    assert not any("adapter" in name for name, _ in plain.named_parameters())


def test_a_kept_alpha_below_one_counts_in_the_adapter() -> None:
    training = training_of(**FROZEN)
    site = plant(training, "r3c0", "lora_2", stage=S.FOSSILIZED)
    training.assign(site, Role.FOSSIL, 0.5, 0.5, True)
    train(training, 2)
    wanted = outputs(training)
    assert merge_fossils(training, ["r3c0"]) == {}
    torch.testing.assert_close(outputs(training), wanted)


def test_only_loras_of_frozen_layers_are_taken_up() -> None:
    training = training_of(**FROZEN)
    for slot, blueprint in (("r1c0", "widen_half"), ("r0c0", "lora")):
        plant(training, slot, blueprint, stage=S.FOSSILIZED)
        assert "are frozen" in merge_fossils(training, [slot])[slot]


def test_the_rank_stays_below_that_of_the_layer() -> None:
    training = training_of(**FROZEN)
    site = training.site_by_name["r3c0"]
    recipe = BLUEPRINTS.get("transformer", "lora_2")
    rank = 0
    while recipe.misfit(site.place) is None:
        raise_rank(training)
        rank += 2
    assert (
        rank_of(layer_of(training)) == rank < layer_of(training).in_features <= rank + 2
    )


def test_saved_layers_with_an_adapter_are_loaded_in_a_new_process(
    tmp_path: Path,
) -> None:
    saved = []
    x = torch.randn(2, 3)
    for kind in KINDS:
        layer = kind(nn.Linear(3, 4))
        adapt(layer, 2)
        for parameter in layer.adapter.parameters():
            nn.init.normal_(parameter)
        saved.append((layer, layer(x)))
    torch.save((x, saved), tmp_path / "layer.pt")
    code = (
        "import sys, torch\n"
        "x, saved = torch.load(sys.argv[1], weights_only=False)\n"
        "assert all(torch.equal(layer(x), wanted) for layer, wanted in saved)\n"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "layer.pt"], check=True)


def test_wider_layers_of_conv1d_get_fresh_weights_and_biases_of_zero() -> None:
    """They have no method that draws their weights, which a host of the grown widths needs."""
    network = nn.Sequential(conv1d(nn.Linear(3, 4)), conv1d(nn.Linear(4, 2)))
    shapes = {"0.weight": (3, 6), "0.bias": (6,), "1.weight": (6, 2)}
    redraw(network, shapes)
    assert network(torch.randn(5, 3)).shape == (5, 2)
    for layer in network:
        assert torch.count_nonzero(layer.weight) == layer.weight.numel()
        assert not layer.bias.any()
