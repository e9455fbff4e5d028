"""Several decisions before an epoch: `env.edits_per_epoch`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from esper.agents.controller import RandomController
from esper.config import TrainingConfig
from esper.core.action import Op
from esper.core.stage import SeedStage as S
from esper.env.planted import PlantedVectorEnv
from esper.env.planted_law import SimParams
from esper.telemetry.event import ActionTaken, EpochCompleted
from tests.core_helpers import Rig, rig, tensors_of, wait_actions
from tests.env.planted_helpers import Step, planted
from tests.env.test_merging import widths

EDITS = 8
AT_ONCE = replace(
    SimParams(), at_once=(True, True, False, False), merges=(True, True, False, False)
)
"""Two kinds of seeds that are a part of their host at once, and two that pass stages."""
FREE = {"edits_per_epoch": EDITS, "one_incubating": False, "min_prune_age": 1}
WIDENINGS: dict[str, Any] = {
    "at_once": True,
    "merge": True,
    "slots": ["r0c0", "r2"],
    "edits_per_epoch": EDITS,
}


def editing(
    n_envs: int = 3, horizon: int = 12, law: SimParams = AT_ONCE, **env: Any
) -> PlantedVectorEnv:
    return planted(n_envs, horizon, law, env={**FREE, "merge": True, **env})


def plant(env: PlantedVectorEnv, *seeds: tuple[str, str] | None) -> NDArray[np.int64]:
    """GERMINATE in each env, or WAIT."""
    actions = wait_actions(env.num_envs)
    for row, seed in enumerate(seeds):
        if seed is not None:
            actions[row] = env.action_spec.encode(Op.GERMINATE, *seed)
    return actions


def randomly(
    env: PlantedVectorEnv, only: int | None = None, seed: int = 0
) -> list[Step]:
    """An episode of random actions, or with ``only`` in that env, while the others WAIT."""
    player = RandomController(env.action_spec, env.layout, env.num_envs)
    observation, info = env.reset(seed=seed)
    player.begin()
    steps: list[Step] = [(observation, np.zeros(env.num_envs), info)]
    while not env.done.all() and (only is None or not env.done[only]):
        actions = player.act(observation, info["action_mask"])
        if only is not None:
            actions[np.arange(env.num_envs) != only] = 0
        observation, rewards, *_, info = env.step(actions)
        steps.append((observation, rewards, info))
    return steps


def test_with_one_edit_every_step_trains_an_epoch() -> None:
    env = editing(edits_per_epoch=1)
    steps = randomly(env)
    assert len(steps) == 1 + env.horizon
    assert all(info["trained"].all() for *_, info in steps[1:])
    assert not env.state.edits.any()
    for observation, *_ in steps:
        assert (env.layout.read(observation, "edits_left") == 1).all()


def test_an_edit_returns_at_once_and_its_env_stands_still() -> None:
    env = editing()
    first, _ = env.reset(seed=0)
    observation, rewards, terminated, truncated, info = env.step(
        plant(env, ("r0c0", "moss"))
    )
    assert info["trained"].tolist() == [False, True, True]
    assert env.state.epoch.tolist() == [0, 1, 1]
    assert not (terminated | truncated).any()
    assert rewards[0] == -env.config.reward.germinate_cost
    assert info["reward_terms"]["action_cost"][0] == rewards[0]
    read = env.layout.read
    same = (
        "epoch",
        "validation_loss",
        "loss_slope_1",
        "accuracy_slope_3",
        "best_accuracy",
    )
    for name in same:
        assert read(observation[0], name) == read(first[0], name), name
    assert read(observation, "edits_left").tolist() == [1 - 1 / EDITS, 1, 1]
    assert read(observation[0], "r0c0/stage_fossilized") == 1
    # The next step trains the first env, and the others again.
    *_, info = env.step(wait_actions(3))
    assert info["trained"].all()
    assert env.state.epoch.tolist() == [1, 2, 2]
    assert not env.state.edits.any()


def test_the_last_edit_trains() -> None:
    env = editing(2, edits_per_epoch=2)
    env.reset(seed=0)
    *_, info = env.step(plant(env, ("r0c0", "moss"), ("r0c0", "oak")))
    assert not info["trained"].any()
    *_, info = env.step(plant(env, ("r0c1", "moss")))
    assert info["trained"].all()
    assert env.state.epoch.tolist() == [1, 1]
    *_, info = env.step(plant(env, ("r0c2", "moss"), ("r0c2", "moss")))
    assert not info["trained"].any(), "the next epoch has as many edits"


def test_an_illegal_action_waits_and_trains() -> None:
    env = editing(1)
    env.reset(seed=0)
    actions = plant(env, ("r0c0", "moss"))
    env.step(actions)
    *_, info = env.step(actions)
    assert info["illegal_actions"].tolist() == [1]
    assert info["trained"].all()


def test_a_slot_is_acted_on_once_before_an_epoch() -> None:
    env = editing(1, auto_advance=["G1"])
    env.reset(seed=0)
    *_, info = env.step(plant(env, ("r0c0", "oak")))
    of_slots = info["action_mask"]["op_slot"][0, 1:]
    assert not of_slots[:, 0].any(), "neither pruned nor advanced"
    assert of_slots[Op.GERMINATE - 1].tolist() == [False, True, True]
    env.step(wait_actions(1))
    *_, info = env.step(wait_actions(1))
    assert info["action_mask"]["op_slot"][0, Op.PRUNE, 0]
    *_, info = env.step(env.action_spec.encode(Op.PRUNE, "r0c0")[None])
    assert not info["trained"].any()
    assert env.state.slots.stage[0, 0] == S.PRUNED
    assert not info["action_mask"]["op_slot"][0, 1:, 0].any()

    env = editing(1, law=SimParams())
    env.reset(seed=0)
    *_, info = env.step(plant(env, ("r0c0", "oak")))
    assert env.state.slots.stage[0, 0] == S.GERMINATED
    assert not info["action_mask"]["op_slot"][0, Op.ADVANCE, 0], "before an epoch"
    *_, info = env.step(wait_actions(1))
    assert info["action_mask"]["op_slot"][0, Op.ADVANCE, 0]


def test_seeds_without_stages_are_planted_in_all_slots_before_one_epoch() -> None:
    env = editing(1, one_incubating=True, max_seeds=1)
    env.reset(seed=0)
    for slot in env.action_spec.slots:
        *_, info = env.step(plant(env, (slot, "moss")))
        assert not info["trained"].any()
    assert info["action_mask"]["op"].sum() == 1, "WAIT"
    env.step(wait_actions(1))
    assert env.state.slots.merges.tolist() == [[1, 1, 1]]
    assert env.state.epoch.tolist() == [1]


@pytest.mark.parametrize("seed", range(3))
def test_an_env_does_not_depend_on_what_the_others_do(seed: int) -> None:
    """They edit while it trains, and train while it edits."""
    together, alone = editing(), editing()
    of_all = randomly(together, seed=seed)
    of_one = randomly(alone, only=1, seed=seed)
    assert any(not info["trained"][1] for *_, info in of_one[1:])
    for (seen, paid, info), (wanted, expected, own) in zip(
        of_all, of_one, strict=False
    ):
        np.testing.assert_array_equal(seen[1], wanted[1])
        assert paid[1] == expected[1]
        assert info["trained"][1] == own["trained"][1]
        for name, mask in own["action_mask"].items():
            np.testing.assert_array_equal(info["action_mask"][name][1], mask[1])


@pytest.mark.parametrize("mode", ["shaped", "loss_shaped"])
def test_potential_terms_cancel_with_a_discount_by_epochs(mode: str) -> None:
    env = planted(3, 12, AT_ONCE, env=FREE, reward={"mode": mode})
    gamma = env.config.reward.gamma
    total, discount = np.zeros(3), np.ones(3)
    decisions = 0
    for _, rewards, info in randomly(env)[1:]:
        terms = info["reward_terms"]
        held = ~info["trained"]
        decisions += int(held.sum())
        for name, term in terms.items():
            if name != "action_cost":
                assert not term[held].any(), name
        assert (rewards[held & ~info["idle"]] < 0).all()
        total += discount * sum(terms[name] for name in env.reward.stored)
        discount *= np.where(info["trained"], gamma, 1.0)
    assert decisions > 10
    np.testing.assert_allclose(total, 0, atol=1e-12)
    np.testing.assert_allclose(discount, gamma**env.horizon)


@pytest.mark.parametrize("cut", range(1, 9))
def test_a_run_goes_on_in_the_midst_of_the_edits_of_an_epoch(cut: int) -> None:
    whole = editing()
    expected = randomly(whole)
    first, rest = editing(), editing()
    player = RandomController(first.action_spec, first.layout, 3)
    observation, info = first.reset(seed=0)
    player.begin()
    for _ in range(cut):
        observation, *_, info = first.step(player.act(observation, info["action_mask"]))
    observation, info = rest.load_state_dict(first.state_dict())
    later = expected[cut:]
    for number, (seen, paid, wanted) in enumerate(later):
        if number:
            observation, rewards, *_, info = rest.step(
                player.act(observation, info["action_mask"])
            )
            np.testing.assert_array_equal(rewards, paid)
        np.testing.assert_array_equal(observation, seen)
        np.testing.assert_array_equal(info["trained"], wanted["trained"])
    np.testing.assert_array_equal(rest.state.total_reward, whole.state.total_reward)


def test_same_step_starts_the_next_episode_and_says_what_the_last_step_trained() -> (
    None
):
    config = TrainingConfig.parse({"env": {**FREE, "n_envs": 2, "episode_length": 2}})
    env = PlantedVectorEnv(config, AT_ONCE, AutoresetMode.SAME_STEP)
    env.reset(seed=0)
    env.step(wait_actions(2))
    observation, _, terminated, _, info = env.step(plant(env, None, ("r0c0", "moss")))
    assert terminated.tolist() == [True, False]
    assert info["final_info"]["trained"].tolist() == [True, False]
    assert env.state.epoch.tolist() == [0, 1]
    assert env.layout.read(observation, "edits_left").tolist() == [1, 1 - 1 / EDITS]
    _, _, terminated, *_ = env.step(wait_actions(2))
    assert terminated.tolist() == [False, True]


def events_of(world: Rig) -> tuple[list[ActionTaken], list[EpochCompleted]]:
    return world.of_kind(ActionTaken), world.of_kind(EpochCompleted)


def test_an_epoch_is_reported_once_with_all_that_its_decisions_cost() -> None:
    with rig(env=WIDENINGS) as world:
        world.do("GERMINATE", "r2c0", "widen_half")
        world.do("GERMINATE", "r2c1", "widen_half")
        actions, epochs = events_of(world)
        assert [event.epoch for event in actions] == [0, 0]
        assert not epochs
        world.step()
        (epoch,) = events_of(world)[1]
        assert epoch.epoch == 1
        assert epoch.reward_terms["action_cost"] == pytest.approx(-2 * 0.015)
        assert epoch.reward == pytest.approx(sum(epoch.reward_terms.values()))
        assert epoch.reward == pytest.approx(float(world.env.state.total_reward[0]))
        world.step()
        assert not events_of(world)[1][1].reward_terms["action_cost"]


def network_of(world: Rig, index: int = 0) -> Any:
    return tensors_of(world.training(index))


def same_network(first: Any, second: Any) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        np.testing.assert_array_equal(tensor, second[name], err_msg=name)


def test_an_edit_and_a_wait_train_what_one_step_trains() -> None:
    one = {**WIDENINGS, "edits_per_epoch": 1}
    with rig(2, env=WIDENINGS) as several, rig(2, env=one) as single:
        for world in (several, single):
            planted_in_both = {
                0: world.action("GERMINATE", "r2c0", "widen_half"),
                1: world.action("GERMINATE", "r0c0", "conv_light"),
            }
            world.step(planted_in_both)
            if world is several:
                assert [world.training(env).epoch for env in range(2)] == [0, 0]
                world.step()
            world.step()
        for env in range(2):
            assert several.training(env).epoch == single.training(env).epoch == 2
            same_network(network_of(several, env), network_of(single, env))
            assert several.measurement(env) == single.measurement(env)


def play(world: Rig, steps: Sequence[tuple[Any, ...] | None]) -> None:
    for action in steps:
        if action is None:
            world.step()
        else:
            world.do(*action)


def test_hosts_in_training_go_on_between_two_edits() -> None:
    script = [
        ("GERMINATE", "r2c0", "widen_half"),
        ("GERMINATE", "r0c0", "conv_light"),
        ("GERMINATE", "r2c1", "widen_quarter"),
        None,
        ("ADVANCE", "r0c0"),
        ("GERMINATE", "r2c0", "widen_half"),
        None,
        None,
        ("PRUNE", "r0c0"),
        None,
    ]
    free = {**WIDENINGS, "one_incubating": False, "min_prune_age": 1}
    with rig(env=free) as whole:
        play(whole, script)
        for cut in (2, 6):
            with rig(env=free) as first, rig(env=free) as rest:
                play(first, script[:cut])
                saved = first.env.state_dict()
                seen, _ = rest.env.load_state_dict(saved)
                np.testing.assert_array_equal(seen, first.observation)
                play(rest, script[cut:])
                np.testing.assert_array_equal(rest.observation, whole.observation)
                same_network(network_of(rest), network_of(whole))


def test_a_host_that_waits_after_keeping_a_seed_has_a_snapshot_of_it() -> None:
    kept = {"edits_per_epoch": EDITS}
    with rig(horizon=40, env=kept, governor={"snapshot_every": 40}) as world:
        for op in (("GERMINATE", "r0c0", "norm"), ("ADVANCE", "r0c0")):
            world.do(*op, **({"tempo": 3} if op[0] == "GERMINATE" else {}))
            world.step()
        while world.slot("r0c0").stage is not S.FOSSILIZED:
            stage = world.slot("r0c0").stage
            if stage is S.HOLDING:
                world.do("FOSSILIZE", "r0c0")
            elif world.slot("r0c0").gate_passed:
                world.do("ADVANCE", "r0c0")
            world.step()
        newest = world.host().governor._generations[0]
        assert newest.epoch == world.training().epoch


def test_all_layers_are_four_times_as_wide_before_the_first_epoch() -> None:
    wide = {
        **WIDENINGS,
        "slots": ["r2"],
        "blueprints": ["widen_x4", "widen_x8"],
        "parameter_budget": 100.0,
    }
    with rig(env=wide) as world:
        before = widths(world)
        for slot in world.env.action_spec.slots:
            world.do("GERMINATE", slot, "widen_x4")
            assert world.training().epoch == 0
        world.step()
        assert widths(world) == [4 * width for width in before]
        world.do("GERMINATE", "r2c0", "widen_x8")
        world.step()
        assert widths(world)[0] == 32 * before[0]
