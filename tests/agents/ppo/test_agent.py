"""The agent on a toy env behind the same spaces: parity of rollout and replay, learning, masks, exact state."""

import numpy as np
import pytest
import torch

from esper.agents.ppo.buffer import gae
from tests.agents.ppo.toy import (
    NOTHING,
    Toy,
    learned_well,
    make_agent,
    play,
    replayed_log_probs,
)


@pytest.mark.finding("C3")
def test_replay_reproduces_log_probabilities() -> None:
    agent, toy = make_agent(), Toy(4)
    for _ in range(2):  # the second round acts under statistics that have moved
        _, last = play(agent, toy, steps=15)  # episode starts inside the sequences
        then, now = replayed_log_probs(agent)
        torch.testing.assert_close(then, now, atol=1e-5, rtol=0)
        agent.update(last)


@pytest.mark.trap(17)
def test_the_rollout_stores_the_observations_that_were_acted_on() -> None:
    agent, toy = make_agent(), Toy(4)
    _, last = play(agent, toy, steps=6)
    agent.update(last)
    play(agent, toy, steps=6)
    rollout, *_ = agent.buffer.stack()
    assert torch.equal(
        rollout["observation"], agent.observations.normalize(rollout["raw"])
    )
    assert not torch.equal(rollout["observation"], rollout["raw"])


@pytest.mark.trap(18)
def test_an_update_takes_several_steps_and_the_ratio_moves() -> None:
    agent, toy = make_agent(learning_rate=1e-2, target_kl=100.0), Toy(4)
    _, last = play(agent, toy, steps=12)
    stats = agent.update(last)
    assert stats.minibatches == 16
    assert stats.clip_fraction > 0
    assert stats.approx_kl > 0


@pytest.mark.finding("M3")
def test_a_large_step_stops_at_the_kl_target() -> None:
    agent, toy = make_agent(learning_rate=3e-2), Toy(4)
    _, last = play(agent, toy, steps=12)
    stats = agent.update(last)
    assert stats.stopped_early
    assert stats.minibatches < 16
    assert stats.approx_kl > 1.5 * 0.02


@pytest.mark.finding("H4")
def test_statistics_are_frozen_within_a_round_and_updated_once_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent, toy = make_agent(), Toy(4)
    monkeypatch.setattr(
        toy, "reward", lambda action: action.sum(axis=1).astype(np.float64)
    )  # not the same for all

    def known() -> list[torch.Tensor]:
        every = (agent.observations, agent.rewards)
        return [values.clone() for each in every for values in (each.mean, each.var)]

    for number in (1, 2):
        before = known()
        _, last = play(agent, toy, steps=12)
        agent.value_of(last / 2)  # as for an episode that was truncated
        assert all(
            torch.equal(then, now) for then, now in zip(before, known(), strict=True)
        )
        agent.update(last)  # 16 minibatches
        assert not any(
            torch.equal(then, now) for then, now in zip(before, known(), strict=True)
        )
        assert agent.observations.updates == agent.rewards.updates == number
        assert agent.observations.count == number * 12 * 4


@pytest.mark.finding("L7")
@pytest.mark.parametrize("weight", [0.5, 3e3, 1e5, 1e8])
def test_an_update_reports_the_health_of_its_gradient_norm(weight: float) -> None:
    agent = make_agent(value_coefficient=weight, update_epochs=1, n_minibatches=1)
    _, last = play(agent, Toy(4), steps=12)
    stats = agent.update(last)
    outside = max(0.0, abs(np.log10(stats.gradient_norm)) - 2)
    assert stats.gradient_health == pytest.approx(max(0.0, 1 - outside / 2), abs=1e-9)


@pytest.mark.finding("M4")
def test_truncation_bootstraps_from_the_state_and_the_memory_after_the_action() -> None:
    """An agent that continues gives the same value to that state with its memory at that time."""
    toy, nothing = Toy(4), np.zeros(4)
    (first, masks), (second, later_masks) = toy.observe(), toy.observe()
    stopped, running, forgetful = (make_agent() for _ in range(3))
    for agent in (stopped, running, forgetful):
        agent.begin()
    for agent in (stopped, running):
        agent.act(first, masks)
    stopped.record(
        nothing, nothing, NOTHING, ~NOTHING, NOTHING, ~NOTHING, final_observation=second
    )
    running.record(nothing, nothing, NOTHING, NOTHING, NOTHING, ~NOTHING)
    running.act(second, later_masks)
    running.record(nothing, nothing, NOTHING, NOTHING, NOTHING, ~NOTHING)
    final, values = (
        stopped.buffer.stack()[0]["final_value"][0],
        running.buffer.stack()[0]["value"],
    )
    torch.testing.assert_close(final, values[1])
    assert not torch.isclose(
        final, values[0]
    ).any()  # nor is it that of the state before the action
    assert not torch.isclose(
        final, forgetful.value_of(second)
    ).any()  # nor that of an episode that begins there
    # The end of a rollout does not end the episode: the last value is computed in the same way.
    torch.testing.assert_close(stopped.value_of(second), values[1])


@pytest.mark.finding("G1")
def test_rewards_are_divided_and_never_shifted(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them are losses: with their mean taken off, half would be gains."""
    agent, toy = make_agent(), Toy(4)
    monkeypatch.setattr(toy, "reward", lambda action: -1.0 - action.sum(axis=1) / 100)
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(
        "esper.agents.ppo.agent.gae",
        lambda rewards, *rest: seen.append(rewards) or gae(rewards, *rest),
    )
    _, last = play(agent, toy, steps=12)
    earned = agent.buffer.stack()[0]["reward"]
    agent.update(last)
    assert agent.rewards.scale != 1
    torch.testing.assert_close(seen[0], earned / agent.rewards.scale)


@pytest.mark.finding("G1")
def test_one_pass_of_the_network_decides_for_all_envs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent, toy = make_agent(8), Toy(8)
    rows: list[int] = []
    decide = agent.network.decide
    monkeypatch.setattr(
        agent.network,
        "decide",
        lambda scene, *rest, **more: (
            rows.append(len(scene.context)) or decide(scene, *rest, **more)
        ),
    )
    agent.begin()
    actions = agent.act(*toy.observe())
    assert rows == [8]
    assert len(np.unique(actions, axis=0)) > 1  # each env has draws of its own


@pytest.mark.trap(25)
@pytest.mark.slow
def test_the_blueprint_depends_on_the_slot_and_the_agent_learns() -> None:
    rewards, _ = learned_well()
    # About 80 % of the steps allow more than WAIT; chance pays 1/6 · 1/3 · 1/3 of these.
    assert rewards[0] < 0.1
    assert rewards[-1] > 0.6


def test_an_envs_actions_do_not_depend_on_the_number_of_envs() -> None:
    few, many = make_agent(2), make_agent(4)
    observation, masks = Toy(4).observe()
    few.begin()
    many.begin()
    part = few.act(observation[:2], {name: mask[:2] for name, mask in masks.items()})
    np.testing.assert_array_equal(part, many.act(observation, masks)[:2])


def test_a_truncated_episode_needs_its_final_observation() -> None:
    agent, toy = make_agent(), Toy(4)
    agent.begin()
    observation, masks = toy.observe()
    agent.act(observation, masks)
    with pytest.raises(ValueError, match="truncated"):
        agent.record(np.zeros(4), np.zeros(4), NOTHING, ~NOTHING, NOTHING, ~NOTHING)


def test_idle_envs_leave_no_trace_in_the_update() -> None:
    results = []
    for junk in (0.0, 100.0):
        agent, toy = make_agent(), Toy(4, seed=5)
        agent.begin()
        idle = np.array([False, False, False, True])
        for step in range(6):
            observation, masks = toy.observe()
            action = agent.act(observation, masks)
            rewards = np.where(idle, junk, toy.reward(action))
            agent.record(
                rewards, np.zeros(4), np.full(4, step == 5) | idle, NOTHING, idle, ~idle
            )
        agent.update(observation)
        results.append([p.detach().clone() for p in agent.parameters])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_state_round_trip_goes_on_with_the_same_bits() -> None:
    agent, toy = make_agent(), Toy(4)
    _, last = play(agent, toy, steps=6)
    agent.update(last)
    copy = make_agent()
    copy.load_state_dict(agent.state_dict())
    for one in (agent, copy):
        _, last = play(one, Toy(4, seed=9), steps=6)
        one.update(last)
    assert all(
        torch.equal(a, b)
        for a, b in zip(agent.parameters, copy.parameters, strict=True)
    )
