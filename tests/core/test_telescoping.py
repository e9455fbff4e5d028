"""Potential terms of arbitrary episodes: any states, stages, outcomes and ends."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from esper.config import RewardConfig
from esper.core.action import Op
from esper.core.reward_modes import MODES, POTENTIALS, Reward
from esper.core.reward_terms import RewardState, Transition
from esper.core.stage import SeedStage

DWELL = 10
SLOTS = 4
PERCENT = ("accuracy", "committed", "all_off", "baseline")
LOSSES = ("loss", "committed_loss", "all_off_loss", "baseline_loss")

states = st.builds(
    RewardState,
    **{name: st.floats(0, 100) for name in PERCENT},
    **{name: st.floats(0, 300) for name in LOSSES},
    weighted_share=st.floats(0, 1e5),
    fossil_parameters=st.integers(0, 3000),
    stage=st.lists(
        st.sampled_from(list(SeedStage)), min_size=SLOTS, max_size=SLOTS
    ).map(np.array),
    epochs_in_stage=st.lists(st.integers(0, 40), min_size=SLOTS, max_size=SLOTS).map(
        np.array
    ),
)
Step = tuple[RewardState, Op, bool, bool]
steps = st.tuples(states, st.sampled_from(list(Op)), st.booleans(), st.booleans())
modes = st.sampled_from(sorted(MODES))
gammas = st.sampled_from([0.9, 0.995, 1.0])
episodes = st.lists(steps, min_size=1, max_size=40)


def rewards(mode: str, gamma: float, n_envs: int | None = None) -> Reward:
    return Reward(RewardConfig(mode=mode, gamma=gamma), DWELL, n_envs)  # type: ignore[arg-type]


def transition(before: RewardState, after: RewardState, **values: Any) -> Transition:
    given: dict[str, Any] = {
        "op": Op.WAIT,
        "succeeded": True,
        "rolled_back": False,
        "terminated": False,
    }
    return Transition(before, after, **{**given, **values}, horizon=40, budget=2770.0)


def play(reward: Reward, episode: list[Step], terminated: bool) -> list[dict[str, Any]]:
    """Terms of each step by name; the last step ends the episode as terminated, or leaves it open or truncated."""
    paid, before = [], episode[0][0]
    for number, (after, op, succeeded, rolled_back) in enumerate(episode):
        ends = terminated and number == len(episode) - 1
        step = transition(
            before,
            after,
            op=op,
            succeeded=succeeded,
            rolled_back=rolled_back,
            terminated=ends,
        )
        paid.append(reward.pay(step))
        before = after
    return paid


def discounted(paid: list[dict[str, Any]], names: set[str], gamma: float) -> float:
    return sum(
        gamma**number * float(step[name])
        for number, step in enumerate(paid)
        for name in names
    )


@pytest.mark.trap(21)
@settings(max_examples=25, deadline=None)
@given(mode=modes, gamma=gammas, episode=episodes)
def test_potential_terms_of_an_episode_telescope_to_zero(
    mode: str, gamma: float, episode: list[Step]
) -> None:
    """Episodes have prunes, refusals, rollbacks, and jumps of stage, accuracy and loss."""
    reward = rewards(mode, gamma)
    assert set(reward.stored) == set(POTENTIALS) & set(MODES[mode])
    paid = play(reward, episode, terminated=True)
    for name in reward.stored:
        assert discounted(paid, {name}, gamma) == pytest.approx(0.0, abs=1e-9)
    assert all(math.isfinite(value) for step in paid for value in step.values())
    assert reward.potential == 0


@pytest.mark.trap(21)
@settings(max_examples=25, deadline=None)
@given(mode=modes, gamma=gammas, episode=episodes, value=st.floats(-5, 5))
def test_a_truncated_return_with_its_bootstrap_is_the_one_without_potentials(
    mode: str, gamma: float, episode: list[Step], value: float
) -> None:
    """Φ of the last state stays owed. The value that is right for shaped rewards is V − Φ, so that
    Σ γ^t (r + F) + γ^n (V − Φ) is Σ γ^t r + γ^n V."""
    reward, count = rewards(mode, gamma), len(episode)
    paid = play(reward, episode, terminated=False)
    last = sum(
        float(POTENTIALS[name](episode[-1][0], reward.config, DWELL))
        * getattr(reward.config, name)
        for name in reward.stored
    )
    assert float(reward.potential) == pytest.approx(last, abs=1e-12)
    others = set(reward.names) - set(POTENTIALS)
    shaped = discounted(paid, set(reward.names), gamma) + gamma**count * (value - last)
    assert shaped == pytest.approx(
        discounted(paid, others, gamma) + gamma**count * value, abs=1e-8
    )


@pytest.mark.trap(22)
@settings(max_examples=25, deadline=None)
@given(mode=modes, episode=episodes)
def test_the_outcome_is_paid_at_termination_only(
    mode: str, episode: list[Step]
) -> None:
    """A truncated episode gets V(s') instead."""
    at_the_end = {"benefit", "loss_benefit", "fossil_cost"} & set(MODES[mode])
    for step in play(rewards(mode, 0.995), episode, terminated=False):
        assert not any(step[name] for name in at_the_end)
    *_, last = play(rewards(mode, 0.995), episode, terminated=True)
    final, config = episode[-1][0], RewardConfig()
    want = {
        "benefit": (final.committed - final.baseline) / config.benefit_scale,
        "loss_benefit": (final.baseline_loss - final.committed_loss)
        / config.loss_benefit_scale,
        "fossil_cost": -0.1 * final.fossil_parameters / 2770.0,
    }
    assert {name: float(last[name]) for name in at_the_end} == {
        name: pytest.approx(want[name], abs=1e-12) for name in at_the_end
    }


def random_state(random: np.random.Generator, n_envs: int) -> RewardState:
    numbers = {name: random.uniform(0, 100, n_envs) for name in (*PERCENT, *LOSSES)}
    return RewardState(
        **numbers,
        weighted_share=random.uniform(0, 1e4, n_envs),
        fossil_parameters=random.integers(0, 3000, n_envs),
        stage=random.choice(np.array(SeedStage), (n_envs, SLOTS)),
        epochs_in_stage=random.integers(0, 40, (n_envs, SLOTS)),
    )


def one_env(state: RewardState, env: int) -> RewardState:
    return RewardState(**{name: value[env] for name, value in vars(state).items()})


@pytest.mark.trap(21)
@pytest.mark.parametrize("mode", MODES)
def test_envs_that_end_idle_and_start_again_apart_are_paid_as_if_each_were_alone(
    mode: str,
) -> None:
    """Arrays of envs: ends, idle steps and resets of single envs, against a reward of one env each."""
    random, n_envs, gamma = np.random.default_rng(5), 6, 0.97
    together, alone = (
        rewards(mode, gamma, n_envs),
        [rewards(mode, gamma) for _ in range(n_envs)],
    )
    names = set(together.stored)
    running = np.ones(n_envs, dtype=bool)
    total, age, ended = np.zeros(n_envs), np.zeros(n_envs), 0
    before = random_state(random, n_envs)
    for _ in range(60):
        restart: NDArray[np.bool_] = ~running & (random.random(n_envs) < 0.3)
        together.reset(restart)
        for env in np.flatnonzero(restart):
            alone[env].reset()
        running = running | restart
        total[restart] = age[restart] = 0
        after = random_state(random, n_envs)
        outcome = {
            "op": random.choice(np.array(Op), n_envs),
            "succeeded": random.random(n_envs) < 0.8,
            "rolled_back": random.random(n_envs) < 0.1,
            "terminated": running & (random.random(n_envs) < 0.1),
        }
        paid = together.pay(transition(before, after, **outcome), running)
        for env in range(n_envs):
            own = {name: values[env] for name, values in outcome.items()}
            step = transition(one_env(before, env), one_env(after, env), **own)
            expected = (
                alone[env].pay(step) if running[env] else dict.fromkeys(paid, 0.0)
            )
            assert {name: float(term[env]) for name, term in paid.items()} == expected
        total += gamma**age * sum((paid[name] for name in names), np.zeros(n_envs))
        age += running
        np.testing.assert_allclose(total[outcome["terminated"]], 0.0, atol=1e-12)
        ended += int(outcome["terminated"].sum())
        running = running & ~outcome["terminated"]
        before = after
    assert ended > 5
