"""Flat actions: one number for every legal joint action, no two for the same, and a mask that is exact."""

from __future__ import annotations

import itertools
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import VectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from numpy.typing import NDArray

from esper.core.action import HEADS, RELEVANT, ActionSpec, Op, joint_actions
from esper.core.mask import legal_joint_actions
from esper.env.flat_action import FlatAction, FlatActionVector
from esper.env.slot_env import SlotVectorEnv

PLANTED = ActionSpec(("r0c0", "r1c0", "r2c0"), ("fern", "moss", "oak", "vine"))


def vector(n_envs: int = 4, **keywords: Any) -> SlotVectorEnv:
    made = gymnasium.make_vec(
        "esper/Growth-v0", num_envs=n_envs, task="planted", **keywords
    )
    assert isinstance(made, SlotVectorEnv)
    return made


def canonical(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Rows [N, 8] with the heads that do not matter for their op set to 0."""
    matters = np.array(
        [[head == "op" or head in RELEVANT[op] for head in HEADS] for op in Op]
    )
    return rows * matters[rows[:, 0]]


def every_row(spec: ActionSpec) -> NDArray[np.int64]:
    return np.array(list(itertools.product(*map(range, spec.sizes))))


def test_the_number_of_joint_actions_of_planted_by_op() -> None:
    table = joint_actions(PLANTED)
    assert table.shape == (679, 8)
    counted = {op.name: int((table[:, 0] == op).sum()) for op in Op}
    assert counted == {
        "WAIT": 1,
        "GERMINATE": 3 * 4 * 4 * 3 * 3,  # slot, blueprint, style, tempo, alpha target
        "SET_ALPHA_TARGET": 3
        * 3
        * 4
        * 5,  # slot, alpha target, alpha speed, alpha curve
        "PRUNE": 3 * 4 * 5,  # slot, alpha speed, alpha curve
        "FOSSILIZE": 3,
        "ADVANCE": 3,
    }
    assert table[0].tolist() == [0] * 8


@pytest.mark.parametrize(
    "spec",
    [PLANTED, ActionSpec(("a", "b"), ("x",)), ActionSpec(("a",), ("x", "y", "z"))],
)
def test_every_joint_action_is_there_once(spec: ActionSpec) -> None:
    table = joint_actions(spec)
    everything = np.unique(canonical(every_row(spec)), axis=0)
    assert len(np.unique(table, axis=0)) == len(table)
    np.testing.assert_array_equal(np.unique(table, axis=0), everything)


EASY_GATE = {"gates": {"trial_standard_errors": 1000.0}}


def choose(
    table: NDArray[np.int64], legal: NDArray[np.bool_], random: np.random.Generator
) -> int:
    """The number of a legal action: any op, but PRUNE and SET_ALPHA_TARGET seldom, so that seeds come of age."""
    ops = np.unique(table[legal, 0])
    if random.random() < 0.8:
        ops = ops[~np.isin(ops, [Op.PRUNE, Op.SET_ALPHA_TARGET])]
    return int(
        random.choice(np.flatnonzero(legal & (table[:, 0] == random.choice(ops))))
    )


@pytest.mark.parametrize(
    "config",
    [{}, {"one_incubating": False, "parameter_budget": 1.0}],
    ids=["default", "tight"],
)
def test_the_mask_is_exact_in_every_state_that_play_reaches(
    config: dict[str, Any],
) -> None:
    """The mask is compared with the op × slot and slot × blueprint tables, action by action, for two episodes."""
    env, random = (
        vector(2, env=EASY_GATE | config, episode_length=30),
        np.random.default_rng(0),
    )
    table = joint_actions(env.action_spec)
    _, info = env.reset(seed=0)
    seen = dict.fromkeys(Op, 0)
    for _ in range(60):
        masks = info["action_mask"]
        flat = legal_joint_actions(table, masks)
        op, slot, blueprint = table[:, :3].T
        fits = (op != Op.GERMINATE) | masks["slot_blueprint"][:, slot, blueprint]
        wanted = (op == Op.WAIT) | masks["op_slot"][:, op, slot] & fits
        np.testing.assert_array_equal(flat, wanted)
        for kind in Op:
            seen[kind] += int(flat[:, op == kind].sum())
        info = env.step(table[[choose(table, legal, random) for legal in flat]])[4]
    assert all(seen.values()), f"every op was to be legal at some time: {seen}"


def test_the_env_takes_what_the_mask_allows_and_counts_the_rest() -> None:
    env, random = (
        FlatActionVector(vector(16, env=EASY_GATE, episode_length=24)),
        np.random.default_rng(0),
    )
    table = env.table.actions
    _, info = env.reset(seed=0)
    illegal, taken = np.zeros(16, dtype=np.int64), set()
    for step in range(1, 73):
        legal = info["action_mask"] == 1
        chosen = np.array([choose(table, mask, random) for mask in legal])
        anything = random.random(16) < 0.2
        chosen[anything] = random.integers(len(table), size=anything.sum())
        illegal += ~legal[np.arange(16), chosen]
        taken |= set(table[chosen[legal[np.arange(16), chosen]], 0].tolist())
        *_, terminated, _, info = env.step(chosen)
        assert terminated.all() == (step % 24 == 0)
        counted = (
            info["final_info"]["illegal_actions"]
            if terminated.all()
            else info["illegal_actions"]
        )
        assert counted.tolist() == illegal.tolist()
        if terminated.all():
            assert illegal.sum() > 16
            illegal[:] = 0
    assert taken == set(Op)


def test_one_host_and_many_take_the_same_actions() -> None:
    one = FlatAction(gymnasium.make("esper/Growth-v0", task="planted"))
    many = FlatActionVector(vector(1))
    assert (
        one.action_space == many.single_action_space == gymnasium.spaces.Discrete(679)
    )
    (observation, info), (observations, infos) = one.reset(seed=0), many.reset(seed=0)
    one.action_space.seed(0)
    for step in range(1, 51):
        assert info["action_mask"].dtype == np.int8
        np.testing.assert_array_equal(info["action_mask"], infos["action_mask"][0])
        np.testing.assert_array_equal(one.action_masks(), many.action_masks()[0])
        assert one.action_masks().dtype == np.bool_
        action = one.action_space.sample(info["action_mask"])
        observation, reward, terminated, _, info = one.step(action)
        observations, rewards, _, _, infos = many.step(np.array([action]))
        assert reward == rewards[0]
        assert terminated == (step == 50)
        assert info["illegal_actions"] == 0
        if terminated:
            np.testing.assert_array_equal(
                info["action_mask"], infos["final_info"]["action_mask"][0]
            )
            observations = infos["final_obs"]
        np.testing.assert_array_equal(observation, observations[0])


def test_final_masks_are_those_of_ended_episodes_only() -> None:
    env = FlatActionVector(vector(2, episode_length=4))
    env.reset(seed=0)
    wait = np.zeros(2, dtype=np.int64)
    env.step(wait)
    env.reset(options={"reset_mask": np.array([False, True])})
    for _ in range(3):
        *_, info = env.step(wait)
    assert info["_final_info"].tolist() == [True, False]
    assert info["final_info"]["action_mask"].sum(axis=1).tolist() == [1 + 432, 0]
    assert info["final_info"]["_action_mask"].tolist() == [True, False]


@pytest.mark.parametrize("wrong", [-1, 679, 1.0, True])
def test_a_number_that_is_no_action_is_refused(wrong: Any) -> None:
    many, one = (
        FlatActionVector(vector(2)),
        FlatAction(gymnasium.make("esper/Growth-v0", task="planted")),
    )
    many.reset(seed=0)
    one.reset(seed=0)
    with pytest.raises(ValueError, match="2 integers, each from 0 to 678"):
        many.step(np.array([wrong, wrong]))
    with pytest.raises(ValueError, match="an integer from 0 to 678"):
        one.step(wrong)


def test_other_wrappers_may_lie_between() -> None:
    env: VectorEnv[Any, Any, Any] = FlatActionVector(
        RecordEpisodeStatistics(vector(2, episode_length=2))
    )
    env.reset(seed=0)
    for _ in range(2):
        *_, info = env.step(np.zeros(2, dtype=np.int64))
    assert info["episode"]["l"].tolist() == [2, 2]
    assert info["action_mask"].shape == (2, 679)


def test_one_host_can_be_made_again_from_its_spec() -> None:
    env = FlatAction(gymnasium.make("esper/Growth-v0", task="planted"))
    assert env.spec is not None
    assert gymnasium.make(env.spec).action_space == env.action_space
