"""Seeds that are kept become a part of their hosts' layers, and their slots grow again."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from esper.agents.make import make_controller
from esper.compare.compute import ComputeMeter, EpochKind
from esper.compare.runner import grown_layers
from esper.core.action import Op
from esper.core.blueprints.adapted import AdaptedLinear, rank_of
from esper.core.stage import SeedStage as S
from esper.env.backend import look_at_layers
from esper.env.make import make_env
from esper.env.vector_env import GrowthVectorEnv
from esper.hosts.cnn import CNNHost
from esper.hosts.widen import redraw
from esper.telemetry.event import EpisodeCompleted, EpochCompleted, StageChanged
from esper.telemetry.seed_history import Life
from esper.training.host_state import all_tensors
from esper.training.rng import seeded
from tests.core_helpers import DAMAGE, Rig, digits, rig, tiny_config
from tests.training.growing import text

MERGES: dict[str, Any] = {"at_once": True, "merge": True, "slots": ["r0c0", "r2"]}


def widths(world: Rig) -> list[int]:
    modules = world.training().host.modules()
    return [layer.out_channels for layer in modules if isinstance(layer, nn.Conv2d)]


def test_a_kept_widening_becomes_a_part_of_its_layers_and_its_slot_is_free() -> None:
    with rig(env=MERGES) as world:
        world.step()  # before the first epoch, it would be at once
        parameters = world.training().host.parameter_count
        offered = world.env.offers.parameters[0].copy()
        world.do("GERMINATE", "r2c0", "widen_half")
        slot = world.slot("r2c0")
        assert (slot.stage, slot.merges, slot.last_merge) == (S.DORMANT, 1, 2)
        assert slot.merged_parameters == 130
        assert widths(world) == [5, 6]
        assert world.training().host.parameter_count == parameters + 130
        assert world.training().site_by_name["r2c0"].seed is None
        assert world.info["action_mask"]["op_slot"][0, Op.GERMINATE].all()
        r0c0, r2c0, _ = range(3)
        assert (world.env.offers.parameters[0, r2c0] != offered[r2c0]).any()
        assert (world.env.offers.parameters[0, r0c0] > offered[r0c0]).any()
        changes = world.of_kind(StageChanged)
        assert [(c.before, c.after, c.cause) for c in changes] == [
            ("DORMANT", "FOSSILIZED", "germinate"),
            ("FOSSILIZED", "DORMANT", "merged"),
        ]
        _, epoch = world.of_kind(EpochCompleted)
        assert epoch.contributions.keys() == {"r2c0"}, "measured while it could be"
        assert epoch.fossil_parameters == 130
        world.step()
        assert world.of_kind(EpochCompleted)[2].fossil_parameters == 130
        assert world.of_kind(EpochCompleted)[2].parameters == parameters + 130


def test_a_controller_sees_how_wide_a_layer_is_how_often_it_grew_and_what_that_brought() -> (
    None
):
    with rig(env=MERGES) as world:
        assert world.value("r2c0/width") == pytest.approx(np.log2(3) / 10)
        world.step()
        world.do("GERMINATE", "r2c0", "widen_half")
        merged = float(world.env.state.accuracy[0])
        world.step()
        gained = float(world.env.state.accuracy[0]) - merged
        expected = {
            "width": np.log2(5) / 10,
            "width_ratio": np.log2(5 / 3),
            "merges": 1.0,
            "since_merge": 1 / 8,
            "merge_gain": np.clip(gained, -10, 10) / 10,
        }
        seen = {name: world.value(f"r2c0/{name}") for name in expected}
        assert seen == pytest.approx(expected, abs=1e-6)
        first = world.training().host.parameter_count - 130
        assert world.value("host_parameters") == pytest.approx(
            np.log2(first + 130) / 10
        )
        assert world.value("first_parameters") == pytest.approx(np.log2(first) / 10)
        for name in ("width_ratio", "merges", "since_merge", "merge_gain"):
            assert world.value(f"r2c1/{name}") == 0
        world.reset(options={"reset_mask": np.ones(1, dtype=np.bool_)})
        assert world.value("r2c0/width_ratio") == world.value("r2c0/merges") == 0


def test_each_slot_counts_what_its_merge_has_added_if_several_merge_in_an_epoch() -> (
    None
):
    gained = []
    for edits in (8, 1):
        with rig(env={**MERGES, "edits_per_epoch": edits}) as world:
            first = world.training().host.parameter_count
            for slot in ("r2c0", "r2c1"):
                world.do("GERMINATE", slot, "widen_half")
            if edits > 1:
                world.step()
            slots = [world.slot(name) for name in ("r2c0", "r2c1")]
            assert [slot.merges for slot in slots] == [1, 1]
            gained.append([slot.merged_parameters for slot in slots])
            assert sum(gained[-1]) == world.training().host.parameter_count - first
    assert gained[0] == gained[1], "the second one's new units read the first one's"


def test_widenings_before_the_first_epoch_are_in_their_layers_when_it_trains() -> None:
    with rig(env={**MERGES, "edits_per_epoch": 8}) as world:
        host = world.training().host
        x = world.training().sample
        before = host.eval()(x).detach()
        trained = []
        train = world.env.backend.train

        def look(active: Any, state: Any) -> None:
            trained.append(
                [module.weight.detach().clone() for module in convolutions()]
            )
            torch.testing.assert_close(host.eval()(x), before, rtol=1e-5, atol=1e-6)
            train(active, state)

        def convolutions() -> list[nn.Conv2d]:
            return [
                module for module in host.modules() if isinstance(module, nn.Conv2d)
            ]

        world.env.backend.train = look  # type: ignore[method-assign]
        for slot in ("r2c0", "r2c1"):
            world.do("GERMINATE", slot, "widen_whole")
            assert world.slot(slot).stage is S.FOSSILIZED
        world.step()
        ((first, second),) = trained
        assert (len(first), second.shape[1]) == (6, 6)
        assert second[:, 3:].count_nonzero() > 0, "new units read one another"
        slots = [world.slot(name) for name in ("r2c0", "r2c1")]
        assert [(slot.merges, slot.last_merge) for slot in slots] == [(1, 0), (1, 0)]
        offered = world.env.offers.parameters.copy()
        look_at_layers(world.env)
        assert np.array_equal(world.env.offers.parameters, offered)


def test_by_default_kept_seeds_stay_beside() -> None:
    with rig(env={**MERGES, "merge": False}) as world:
        world.do("GERMINATE", "r2c0", "widen_half")
        world.step()
        assert world.slot("r2c0").stage is S.FOSSILIZED


def test_what_cannot_merge_stays_a_fossil() -> None:
    with rig(horizon=12, env=MERGES) as world:
        world.grow("r0c0", S.FOSSILIZED, "norm")
        world.step()
        assert world.slot("r0c0").stage is S.FOSSILIZED
        planted = world.training().site_by_name["r0c0"].planted
        assert planted is not None
        assert planted.stays.startswith("it changes the output of a block")
        world.do("GERMINATE", "r2c0", "widen_whole")
        assert widths(world) == [6, 6]
        assert world.slot("r0c0").stage is S.FOSSILIZED
        assert planted.module.leading == 3
        world.step()


@pytest.mark.parametrize(("warmup", "epochs"), [(0.5, 1), (2.0, 2), (2.5, 3)])
def test_a_seed_merges_once_its_learning_rate_is_that_of_its_host(
    warmup: float, epochs: int
) -> None:
    with rig(env=MERGES, task={"seed_warmup_epochs": warmup}) as world:
        world.step()
        world.do("GERMINATE", "r2c0", "widen_half")
        for _ in range(epochs - 1):
            assert world.slot("r2c0").stage is S.FOSSILIZED
            assert widths(world) == [3, 6]
            world.step()
        assert world.slot("r2c0").stage is S.DORMANT
        assert widths(world) == [5, 6]
        world.do("GERMINATE", "r2c0", "widen_half")
        assert widths(world) == [7 if warmup == 0.5 else 5, 6]


def test_a_seed_with_another_learning_rate_stays_beside_its_layers() -> None:
    with rig(env=MERGES, task={"seed_rate": 0.5}) as world:
        world.do("GERMINATE", "r2c0", "widen_half")
        world.step()
        planted = world.training().site_by_name["r2c0"].planted
        assert planted is not None
        assert planted.stays == "its learning rate is not that of its host"


def test_a_host_stays_as_it_is_while_an_anomaly_is_pending() -> None:
    with rig(env=MERGES) as world:
        govern = world.env.backend.govern

        def suspicious(active: Any, state: Any) -> Any:
            rollbacks = govern(active, state)
            state.anomaly_pending[:] = True
            return rollbacks

        world.env.backend.govern = suspicious  # type: ignore[method-assign]
        world.step()
        world.do("GERMINATE", "r2c0", "widen_half")
        assert world.slot("r2c0").stage is S.FOSSILIZED
        world.env.backend.govern = govern  # type: ignore[method-assign]
        world.step()
        assert world.slot("r2c0").stage is S.DORMANT


def test_a_rollback_keeps_what_was_merged() -> None:
    with rig(env=MERGES) as world:
        world.step()
        world.do("GERMINATE", "r2c0", "widen_half")
        wanted = {
            name: tensor.clone()
            for name, tensor in world.training().network_tensors(())
        }
        DAMAGE["NaN weight"](world.training())
        world.step()
        assert world.env.state.rolled_back[0]
        assert widths(world) == [5, 6]
        assert world.slot("r2c0").merges == 1
        for name, tensor in world.training().network_tensors(()):
            assert torch.equal(tensor, wanted[name]), name
        world.do("GERMINATE", "r2c0", "widen_half")
        assert world.slot("r2c0").merges == 2


def test_budgets_and_caps_count_what_was_merged() -> None:
    with rig(env={**MERGES, "parameter_budget": 0.5}) as world:
        world.do("GERMINATE", "r2c0", "widen_half")
        mask = world.info["action_mask"]["slot_blueprint"][0]
        assert not mask[1].any(), "130 of 138 parameters are used"
    with rig(env={**MERGES, "max_fossils": 1}) as world:
        world.do("GERMINATE", "r2c0", "widen_half")
        assert not world.info["action_mask"]["op"][0, Op.GERMINATE]


def test_keeping_is_worth_what_it_was_after_a_merge() -> None:
    potentials = []
    for merge in (False, True):
        with rig(
            env={**MERGES, "merge": merge}, reward={"mode": "simplified"}
        ) as world:
            world.do("GERMINATE", "r2c0", "widen_half")
            world.step()
            potentials.append(float(world.env.reward.stored["stage_potential"][0]))
    assert potentials[0] == potentials[1] > 0


def test_a_merged_seed_counts_as_kept_in_the_experience_and_in_its_history() -> None:
    with rig(horizon=4, env=MERGES) as world:
        life = Life(0, 0)
        world.step()
        for _ in range(2):
            world.do("GERMINATE", "r2c0", "widen_half")
        world.step()
        assert world.terminated[0]
        for event in world.events:
            life.handle(event)
        assert [(seed.kept, seed.merged) for seed in life.seeds] == [
            (True, 2),
            (True, 3),
        ]
        assert all(seed.contribution is not None for seed in life.seeds)
        (episode,) = world.of_kind(EpisodeCompleted)
        assert episode.merges == {"r2c0": 2}
        assert episode.fossils == {}
        assert world.env.state.slots.kept[0] == 2


def test_static_is_the_host_of_the_grown_widths_with_fresh_weights() -> None:
    with rig(horizon=3, env=MERGES) as world:
        world.do("GERMINATE", "r2c0", "widen_half")
        world.do("GERMINATE", "r2c1", "widen_half")
        world.step()
        (layers,) = world.env.backend.map_hosts(grown_layers)
        assert layers.leading == {}
        meter = ComputeMeter(digits(), world.env.config, world.env.blueprints)
        kind = EpochKind.of(world.host())
        alone = EpochKind.alone(len(world.training().sites))
        assert meter.of_epoch(kind)[0] > 1.5 * meter.of_epoch(alone)[0]
        grown = world.training().host.state_dict()
    host = digits().build_host()
    with seeded(0):
        redraw(host, {name: torch.Size(s) for name, s in layers.shapes.items()})
        first = next(iter(host.state_dict().values()))
    with seeded(0):
        wanted = CNNHost(1, 10, base=3, blocks=2, rows=2, widths=[5, 9])
    fresh = host.state_dict()
    assert {name: v.shape for name, v in fresh.items()} == {
        name: v.shape for name, v in wanted.state_dict().items()
    }
    assert {v.shape for v in fresh.values()} == {v.shape for v in grown.values()}
    assert torch.count_nonzero(first) == first.numel()


def two_wide(**env: Any) -> GrowthVectorEnv:
    """An env whose first layer has two channels, of which a quarter is a half."""
    task = replace(
        digits(), build_host=partial(CNNHost, 1, 10, base=2, blocks=2, rows=2)
    )
    config = tiny_config(1, 8, env={**MERGES, **env})
    return make_env(config, task=task)


def test_a_blueprint_that_fits_only_a_wider_layer_may_be_planted_once_it_is_wider() -> (
    None
):
    env = two_wide(slots=["r2c0"])
    (names,) = [env.action_spec.offers("r2c0")]
    assert names == ("widen_quarter", "widen_half", "widen_whole")
    _, info = env.reset(seed=0)
    legal = info["action_mask"]["slot_blueprint"][0, 0]
    assert dict(zip(names, legal.tolist(), strict=True)) == {
        "widen_quarter": False,
        "widen_half": True,
        "widen_whole": True,
    }
    spec = env.action_spec
    env.step(spec.encode(Op.GERMINATE, "r2c0", "widen_whole")[None])
    *_, info = env.step(spec.encode(Op.WAIT)[None])
    assert info["action_mask"]["slot_blueprint"][0, 0].all()
    *_, info = env.step(spec.encode(Op.GERMINATE, "r2c0", "widen_quarter")[None])
    assert int(env.state.slots.merges[0, 0]) == 2
    assert env.training[0].site_by_name["r2c0"].place.layers[0].out_channels == 5
    env.close()


def test_hosts_that_do_not_merge_are_offered_what_fits_at_first() -> None:
    env = two_wide(merge=False)
    assert env.action_spec.offers("r2c0") == ("widen_half", "widen_whole")
    assert env.action_spec.offers("r2c1") == (
        "widen_quarter",
        "widen_half",
        "widen_whole",
    )
    env.close()


def need_on_a_frozen_host() -> tuple[GrowthVectorEnv, Any]:
    sections: dict[str, Any] = {
        "task": {"freeze": "body", "learning_rate": 0.01, "batch_size": 25},
        "need": {"threshold": 0.0},
        "env": {
            "at_once": True,
            "merge": True,
            "slots": ["r3"],
            "blueprints": ["lora_2"],
            "need_every": 1,
            "parameter_budget": 0.14,
            "max_seeds": 2,
        },
    }
    env = make_env(tiny_config(1, 12, **sections), task=text())
    controller = make_controller(
        "need", "text", env.action_spec, env.layout, 1, 0, env.config
    )
    return env, controller


def test_ranks_of_all_layers_of_a_frozen_host_grow_under_one_budget() -> None:
    env, controller = need_on_a_frozen_host()
    observation, info = env.reset(seed=0)
    controller.begin()
    training = env.training[0]
    alone = training.host.parameter_count
    saved, middle = None, None
    for epoch in range(12):
        if epoch == 6:
            saved = copy.deepcopy((env.state_dict(), controller.memory_state()))
            middle = observation
        actions = controller.act(observation, info["action_mask"])
        observation, *_, info = env.step(actions)
    whole = {name: t.clone() for name, t in all_tensors(training)}
    adapters = [m for m in training.host.modules() if isinstance(m, AdaptedLinear)]
    ranks = [rank_of(layer) for layer in adapters]
    added = training.host.parameter_count - alone
    assert added == sum(
        rank * (m.in_features + m.out_features)
        for rank, m in zip(ranks, adapters, strict=True)
    )
    assert max(ranks) >= 4
    a_seed = 2 * (8 + 24)
    assert 0.14 * alone - a_seed < added <= 0.14 * alone
    assert int(env.state.slots.added_parameters[0]) == added
    env.close()

    assert saved is not None
    env, controller = need_on_a_frozen_host()
    env.reset(seed=0)
    observation, info = env.load_state_dict(saved[0])
    controller.load_memory_state(saved[1])
    np.testing.assert_array_equal(observation, middle)
    for _ in range(6, 12):
        actions = controller.act(observation, info["action_mask"])
        observation, *_, info = env.step(actions)
    for name, tensor in all_tensors(env.training[0]):
        assert torch.equal(tensor, whole[name]), name
    env.close()
