"""Potential terms of arbitrary episodes: any states, stages, outcomes and ends."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.config import RewardConfig
from esper.core.action import Op
from esper.core.reward_modes import MODES, POTENTIALS, Reward
from esper.core.reward_terms import RewardState, Transition
from esper.core.stage import SeedStage

DWELL = 10
SLOTS = 4
PRICE = 2.5
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
    size = {"horizon": 40, "budget": 2770.0, "doubling": PRICE}
    return Transition(before, after, **{**given, **values, **size})


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
@settings(max_examples=15, deadline=None)
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
@settings(max_examples=15, deadline=None)
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


@settings(max_examples=15, deadline=None)
@given(
    sizes=st.lists(st.floats(0, 8), min_size=1, max_size=20),
    kept=st.floats(0, 8),
)
def test_priced_rewards_add_up_to_the_score_minus_the_price_of_the_final_size(
    sizes: list[float], kept: float
) -> None:
    """Whatever was bought and given back on the way."""
    reward = Reward(RewardConfig(mode="priced"), DWELL)
    first = RewardState(
        **dict.fromkeys((*PERCENT, *LOSSES), 50.0),
        weighted_share=0.0,
        fossil_parameters=0,
        stage=np.zeros(SLOTS, dtype=np.int64),
        epochs_in_stage=np.zeros(SLOTS, dtype=np.int64),
    )
    episode = [
        (replace(first, doublings=size, kept_doublings=kept), Op.WAIT, True, False)
        for size in sizes
    ]
    paid = play(reward, [(first, Op.WAIT, True, False), *episode], terminated=True)
    total = discounted(paid, {"score", "price"}, 1.0)
    assert total * reward.config.benefit_scale == pytest.approx(50.0 - PRICE * kept)


@pytest.mark.trap(22)
@settings(max_examples=15, deadline=None)
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
