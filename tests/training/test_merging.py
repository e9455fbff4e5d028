"""Fossils that become a part of their host's layers while it trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper.core.blueprints import BLUEPRINTS
from esper.core.site import Role
from esper.core.stage import SeedStage as S
from esper.data.task import resolve
from esper.hosts.cnn import CNNHost
from esper.hosts.graft import graft
from esper.hosts.host import Host
from esper.training.host_state import all_tensors, host_state, load_host_state
from esper.training.host_training import HostTraining
from esper.training.merging import merge_fossils, release, removable_units
from esper.training.metrics import make_metrics
from esper.training.native import NativePasses
from esper.training.snapshot import Snapshot, ValidationRecord
from tests.core_helpers import digits, plant, tiny_config, train

BASE = partial(CNNHost, 1, 10, blocks=2, rows=2)
SMALL = partial(BASE, 3)
ALL = {"slots": ["all"], "at_once": True}
RECORD = ValidationRecord(0.0, 0.0, 0.0, 0.0)


def training_of(
    build: Callable[[], Host] = SMALL, native: bool = False, **task: Any
) -> HostTraining:
    whole = replace(digits(), build_host=build)
    config = tiny_config(horizon=100, env=ALL, task=task)
    training = HostTraining(
        0, whole, resolve(config, whole), make_metrics(1, torch.device("cpu"))[0]
    )
    if native:
        training.native = NativePasses(training)
    training.reset(0, 0)
    return training


def widen(training: HostTraining, slot: str, blueprint: str = "widen_whole") -> None:
    """Plants a seed that is kept, trains it for two epochs, and merges it."""
    plant(training, slot, blueprint, stage=S.FOSSILIZED)
    train(training, 2)
    assert merge_fossils(training, [slot]) == {}


def state_of(training: HostTraining) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in all_tensors(training)}


def require_same(one: HostTraining, other: HostTraining) -> None:
    first, second = state_of(one), state_of(other)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def widths(training: HostTraining) -> list[int]:
    return [m.out_channels for m in training.host.modules() if isinstance(m, nn.Conv2d)]


def moments(training: HostTraining, layer: nn.Module) -> Tensor:
    (state,) = (
        group.optimizer.state[layer.weight]
        for group in [training.host_group, *training.seed_groups.values()]
        if layer.weight in group.optimizer.state
    )
    found: Tensor = state["momentum_buffer"]
    return found


def test_a_merged_widening_computes_the_same_and_keeps_its_momentum() -> None:
    training = training_of()
    site = plant(training, "r2c0", "widen_whole", stage=S.FOSSILIZED)
    train(training, 2)
    x = training.task.validation.inputs(0, 40)
    host = training.host.eval()
    seed = site.seed
    assert seed is not None
    first, *_, last = seed.body.children()
    momentum = moments(training, first), moments(training, last)
    (head,) = (m for m in host.modules() if isinstance(m, nn.Linear))
    of_head = moments(training, head)

    def hook(number: int, at: Any) -> Tensor:
        grown = training.sites[number] is site
        return at.h + seed.eval()(at.source) if grown else at.h

    wanted = host.forward_with_hook(x, hook)
    parameters = host.parameter_count + site.parameters
    assert merge_fossils(training, ["r2c0"]) == {}
    torch.testing.assert_close(host(x), wanted)
    assert host.parameter_count == parameters
    assert site.seed is None
    assert widths(training) == [6, 6]
    assert training.site_by_name["r0c0"].place.channels == 6
    convolutions = [m for m in host.modules() if isinstance(m, nn.Conv2d)]
    assert torch.equal(moments(training, convolutions[0])[3:], momentum[0])
    assert torch.equal(moments(training, convolutions[1])[:, 3:], momentum[1])
    assert of_head.any()
    assert torch.equal(moments(training, head), of_head)


@pytest.mark.parametrize(("optimizer", "native"), [("sgd", True), ("adamw", False)])
def test_a_merged_host_trains_as_one_made_with_its_widths_and_weights(
    optimizer: str, native: bool
) -> None:
    rate = {"learning_rate": 0.01 if optimizer == "adamw" else 0.05}
    merged = training_of(native=native, optimizer=optimizer, **rate)
    widen(merged, "r2c0")
    widen(merged, "r2c1", "widen_half")
    made = training_of(
        partial(BASE, 3, widths=[6, 9]), native, optimizer=optimizer, **rate
    )
    load_host_state(made, host_state(merged), BLUEPRINTS)
    start = state_of(merged)
    train(merged, 50)
    train(made, 50)  # 100 steps
    require_same(merged, made)
    moved = (value for name, value in state_of(merged).items() if "weight" in name)
    assert not all(
        torch.equal(a, b) for a, b in zip(moved, start.values(), strict=False)
    )
    if native:
        assert merged.native is not None
        assert not merged.native.reasons


@pytest.mark.parametrize("native", [False, True])
def test_the_update_after_a_merge_is_that_of_the_host_with_its_seed_beside(
    native: bool,
) -> None:
    task = {"batch_size": 64, "samples_per_epoch": 64}  # one step
    merged = training_of(native=native, **task)
    beside = training_of(native=native, **task)
    for training in (merged, beside):
        train(training, 20)  # the seed has fewer steps than its layers
        plant(training, "r2c0", "widen_whole", stage=S.FOSSILIZED)
        train(training, 3)
    assert merge_fossils(merged, ["r2c0"]) == {}
    x = merged.task.validation.inputs(0, 40)
    before = merged.host.eval()(x)
    for training in (merged, beside):
        train(training)
    site = beside.site_by_name["r2c0"]
    seed = site.seed
    assert seed is not None
    wanted = beside.host.eval().forward_with_hook(
        x,
        lambda n, at: (
            at.h + seed.eval()(at.source) if beside.sites[n] is site else at.h
        ),
    )
    found = merged.host.eval()(x)
    assert not torch.allclose(found, before, atol=1e-2)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_seeds_that_merge_together_leave_what_they_would_one_after_the_other(
    optimizer: str,
) -> None:
    rate = {"learning_rate": 0.01 if optimizer == "adamw" else 0.05}
    slots = ["r2c0", "r2c1"]  # the second reads the units of the first

    def grow(training: HostTraining, at_once: bool) -> None:
        train(training, 5)
        for slot in slots:
            plant(training, slot, "widen_whole", stage=S.FOSSILIZED)
        train(training)
        noted: list[str] = []
        for part in [slots] if at_once else [slots[:1], slots[1:]]:
            assert merge_fossils(training, part, noted.append) == {}
        assert noted == slots
        train(training)

    together = training_of(optimizer=optimizer, **rate)
    apart = training_of(optimizer=optimizer, **rate)
    for episode in range(2):  # later seeds have the memory of the first ones
        for training in (together, apart):
            training.reset(0, episode)
            grow(training, at_once=training is together)
        assert together.growths == apart.growths
        require_same(together, apart)


def test_a_slot_grows_again_and_again_and_a_new_episode_starts_with_the_first_host() -> (
    None
):
    training = training_of()
    first = state_of(training)
    for width in (6, 12, 24):
        widen(training, "r2c0")
        assert widths(training) == [width, 6]
        assert training.site_by_name["r1c0"].place.channels == width
    training.reset(0, 0)
    assert widths(training) == [3, 6]
    assert state_of(training).keys() == first.keys()
    for name, tensor in first.items():
        assert torch.equal(state_of(training)[name], tensor), name
    train(training)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("stage", [S.TRAINING, S.BLENDING, S.FOSSILIZED])
@pytest.mark.parametrize("blueprint", ["conv_light", "norm", "attention"])
def test_a_seed_inside_a_layer_that_grows_keeps_its_channels_and_learns_on(
    blueprint: str, stage: S, native: bool
) -> None:
    training = training_of(native=native)
    site = plant(training, "r0c0", blueprint, stage=stage)
    widen(training, "r2c0")
    assert site.seed is not None
    assert site.seed.leading == 3
    before = [parameter.detach().clone() for parameter in site.seed.parameters()]
    again = training_of(native=native)
    load_host_state(again, host_state(training), BLUEPRINTS)
    again.assign(
        again.site_by_name["r0c0"], site.role, site.alpha, site.target, site.learning
    )
    train(training)
    train(again)
    after = list(site.seed.parameters())
    assert not all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    require_same(training, again)
    if native:
        assert training.native is not None
        assert not training.native.reasons
    widen(training, "r2c0", "widen_half")
    assert site.seed.leading == 3
    train(training)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("stage", [S.GERMINATED, S.TRAINING, S.FOSSILIZED])
def test_a_seed_that_reads_or_adds_to_grown_units_gets_new_inputs_or_outputs(
    stage: S, native: bool
) -> None:
    training = training_of(native=native, optimizer="adamw", learning_rate=0.01)
    for grown, other in (("r2c0", "r2c1"), ("r2c1", "r2c0")):
        site = plant(training, other, "widen_half", stage=stage)
        widen(training, grown)
        assert site.seed is not None
        again = training_of(native=native, optimizer="adamw", learning_rate=0.01)
        load_host_state(again, host_state(training), BLUEPRINTS)
        twin = again.site_by_name[other]
        for one in (twin, site):
            of = again if one is twin else training
            of.assign(one, site.role, site.alpha, site.target, site.learning)
        train(training)
        train(again)
        require_same(training, again)
        if stage is not S.FOSSILIZED:
            training.assign(site, *[type(site.role).FOSSIL], 1.0, 1.0, True)
            train(training)
        assert merge_fossils(training, [other]) == {}
        train(training)


def test_a_snapshot_restores_the_shapes_of_layers() -> None:
    training = training_of()
    train(training)
    snapshot = Snapshot()
    snapshot.save(training, RECORD, {})
    before = state_of(training)
    widen(training, "r2c0")
    snapshot.restore(training)
    assert widths(training) == [3, 6]
    assert state_of(training).keys() == before.keys()
    for name, tensor in state_of(training).items():
        assert torch.equal(tensor, before[name]), name
    assert training.growths == {}


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_units_that_are_taken_out_and_merged_again_leave_their_host_as_it_was(
    optimizer: str, native: bool
) -> None:
    training = training_of(native=native, optimizer=optimizer, learning_rate=0.01)
    x = training.task.validation.inputs(0, 40)
    widen(training, "r2c0")
    first = widths(training)
    widen(training, "r2c1", "widen_half")  # joins the new units of both
    widen(training, "r2c0", "widen_half")
    train(training, 2)
    wanted = training.host.eval()(x)
    before = state_of(training)
    size = training.host.parameter_count
    assert removable_units(training, "r2c0") == 3
    release(training, "r2c0", BLUEPRINTS)
    site = training.site_by_name["r2c0"]
    assert site.seed is not None
    assert widths(training) == [6, 9]
    assert training.host.parameter_count + site.parameters == size
    kept = state_of(training)
    for name, tensor in before.items():
        if name.startswith("host.") and "num_batches" not in name:
            part = tensor[tuple(slice(n) for n in kept[name].shape)]
            assert torch.equal(kept[name], part), name
    training.assign(site, Role.BLENDED, 1.0, 1.0, learning=False)
    beside = training.host.forward_with_hook(
        x,
        lambda n, at: (
            at.h + site.seed.eval()(at.source)  # type: ignore[union-attr]
            if training.sites[n] is site
            else at.h
        ),
    )
    torch.testing.assert_close(beside, wanted)
    site.seed.train()
    again = training_of(native=native, optimizer=optimizer, learning_rate=0.01)
    load_host_state(again, host_state(training), BLUEPRINTS)
    again.assign(again.site_by_name["r2c0"], Role.BLENDED, 0.5, 1.0, learning=False)
    assert again.growths == training.growths
    training.assign(site, Role.BLENDED, 0.5, 1.0, learning=False)
    weights = [parameter.detach().clone() for parameter in site.seed.parameters()]
    train(training)
    train(again)
    require_same(training, again)
    assert all(map(torch.equal, weights, site.seed.parameters())), "they do not learn"
    if native:
        assert training.native is not None
        assert not training.native.reasons
    training.remove(site)
    train(training)
    release(training, "r2c1", BLUEPRINTS)
    training.remove(training.site_by_name["r2c1"])
    release(training, "r2c0", BLUEPRINTS)
    training.remove(site)
    assert widths(training) == [3, 6]
    assert first == [6, 6]
    with pytest.raises(ValueError, match="r2c0 has no units"):
        release(training, "r2c0", BLUEPRINTS)
    train(training)


def test_what_cannot_merge_stays_and_says_why() -> None:
    training = training_of()
    plant(training, "r0c0", "conv_light", stage=S.FOSSILIZED)
    assert merge_fossils(training, ["r0c0"]) == {
        "r0c0": "it changes the output of a block, and is not linear in what a layer computes"
    }
    train(training)
    assert training.site_by_name["r0c0"].seed is not None


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(64, 8), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.relu(self.fc1(x.flatten(1))))  # type: ignore[no-any-return]


@pytest.mark.parametrize("native", [False, True])
def test_a_grafted_network_takes_up_what_is_linear_in_a_layer(native: bool) -> None:
    sites = {"r0c0": "fc1", "r0c1": "fc2"}
    build = lambda: graft(Mlp(), sites, topology="mlp", example=torch.zeros(2, 1, 8, 8))  # noqa: E731
    training = training_of(build, native)
    x = training.task.validation.inputs(0, 40)
    site = plant(training, "r0c0", "lora", stage=S.FOSSILIZED)
    plant(training, "r0c1", "mlp_small", stage=S.FOSSILIZED)
    train(training, 2)

    def hook(number: int, at: Any) -> Tensor:
        seed = training.sites[number].seed
        return at.h if seed is None else at.h + seed.eval()(at.source)

    wanted = training.host.eval().forward_with_hook(x, hook)
    size = training.host.parameter_count
    momentum = moments(training, training.host.model.fc1)
    assert merge_fossils(training, ["r0c0", "r0c1"]).keys() == {"r0c1"}
    assert site.seed is None
    torch.testing.assert_close(training.host.forward_with_hook(x, hook), wanted)
    assert training.host.parameter_count == size
    assert torch.equal(moments(training, training.host.model.fc1), momentum)
    again = training_of(build, native)
    load_host_state(again, host_state(training), BLUEPRINTS)
    stays = again.site_by_name["r0c1"]
    again.assign(stays, Role.FOSSIL, 1.0, 1.0, learning=True)
    train(again)
    train(training)
    require_same(training, again)


class Watched(nn.Module):
    """Uses units outside of their layers, so that more of them change its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = (
            nn.Linear(64, 8),
            nn.Linear(8, 8),
            nn.Linear(8, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.fc1(x.flatten(1)))
        share = self.fc1.weight.abs().sum()
        return self.fc3(torch.relu(self.fc2(h))) + share  # type: ignore[no-any-return]


def test_of_seeds_that_merge_together_only_the_one_that_changes_outputs_stays() -> None:
    sites = {"r2c0": "fc1 -> fc2", "r2c1": "fc2 -> fc3"}
    build = lambda: graft(  # noqa: E731
        Watched(), sites, topology="mlp", example=torch.zeros(2, 1, 8, 8)
    )
    training = training_of(build)
    for slot in sites:
        plant(training, slot, "widen_whole", stage=S.FOSSILIZED)
    train(training)
    (stays,) = merge_fossils(training, list(sites)).items()
    assert stays[0] == "r2c0"
    assert "something else uses the units of its layers" in stays[1]
    assert list(training.growths) == ["r2c1"]
    train(training)


def test_layers_of_a_frozen_host_take_up_nothing() -> None:
    """Their weights would not learn any more, and the seed does."""
    training = training_of(freeze="body")
    plant(training, "r2c0", "widen_half", stage=S.FOSSILIZED)
    assert "are frozen" in merge_fossils(training, ["r2c0"])["r2c0"]


def test_a_grafted_network_takes_up_widenings_and_loras() -> None:
    sites = {"r2c0": "fc1 -> fc2", "r3c0": "fc1 -> fc1"}
    build = lambda: graft(Mlp(), sites, topology="mlp", example=torch.zeros(2, 1, 8, 8))  # noqa: E731
    training = training_of(build)
    plant(training, "r3c0", "lora_2", stage=S.FOSSILIZED)
    for width in (16, 24):  # by multiples of 8
        widen(training, "r2c0", "widen_half")
        assert training.host.model.fc1.out_features == width  # type: ignore[union-attr]
    assert merge_fossils(training, ["r3c0"]) == {}
    train(training)
    again = training_of(build)
    load_host_state(again, host_state(training), BLUEPRINTS)
    train(again)
    train(training)
    require_same(training, again)
