"""Warnings about an agent that learns badly; one that learns well has none.

Each warning comes from an agent that was made to learn badly, through ``PPOAgent.update``. Numbers that are not finite
never reach the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from esper.agents.ppo.agent import PPOAgent
from esper.agents.ppo.update import UpdateStats
from esper.config import AnomalyConfig, TrainingConfig
from esper.core.action import HEADS, Op
from esper.telemetry.anomaly import KINDS, AnomalyDetector
from esper.telemetry.event import AnomalyDetected, PolicyUpdated
from tests.agents.ppo.toy import Toy, learned_well, make_agent, play
from tests.telemetry.sample_events import updated

DETECTOR = AnomalyDetector(AnomalyConfig(), max_grad_norm=0.5, rounds=10)


def look(
    stats: UpdateStats, round_: int = 4, detector: AnomalyDetector = DETECTOR
) -> dict[str, list[AnomalyDetected]]:
    """Warnings about an update, by kind."""
    found: dict[str, list[AnomalyDetected]] = {}
    for event in detector.look(PolicyUpdated(round=round_, env_steps=0, **vars(stats))):
        assert event.round == round_
        assert event.advice == KINDS[event.kind]
        assert event.found
        found.setdefault(event.kind, []).append(event)
    return found


def quick(envs: int = 32, **settings: float) -> PPOAgent:
    """An agent that updates in one pass, which is enough for what an update measures."""
    return make_agent(envs, update_epochs=1, n_minibatches=1, **settings)


@cache
def of_fresh() -> UpdateStats:
    """The first update of a new agent."""
    return learned(quick(prior=0.0))


def learned(agent: PPOAgent, steps: int = 12) -> UpdateStats:
    _, last = play(agent, Toy(agent.n_envs), steps)
    return agent.update(last)


def bits(agent: PPOAgent) -> list[torch.Tensor]:
    """Everything that acting and learning depend on."""
    numbers = [p.detach().clone() for p in agent.parameters]
    for statistics in (agent.observations, agent.rewards):
        numbers += [
            statistics.mean.clone(),
            statistics.var.clone(),
            torch.tensor(statistics.count),
        ]
    return numbers


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.slow
def test_an_agent_that_learns_well_gives_no_warning() -> None:
    rewards, updates = learned_well()
    for round_, stats in enumerate(updates[:30], 1):
        assert look(stats, round_) == {}
    assert rewards[30] > 20 * rewards[0]  # it did learn


# --- Probability ratios


# --- Entropy


def saturate(agent: PPOAgent, head: str) -> None:
    """Makes one choice far likelier than the others, as an output layer whose weights grew without limit."""
    network = agent.network
    with torch.no_grad():
        if head == "op":
            network.op_head[-1].bias[int(Op.GERMINATE)] += 30.0  # type: ignore[operator, index, union-attr]
        elif head == "slot":
            network.slot_query[-1].weight.mul_(1e7)  # type: ignore[operator, union-attr]
        elif head == "blueprint":
            network.blueprint_query[-1].weight.mul_(1e7)  # type: ignore[operator, union-attr]
        else:
            place = HEADS[3:].index(head)
            start = sum(network.free_sizes[:place])
            network.free_heads[-1].bias[start] += 30.0  # type: ignore[operator, index, union-attr]


@pytest.mark.trap(26)
@pytest.mark.parametrize("head", HEADS)
def test_the_entropy_warning_of_each_head_fires_at_entropies_that_training_reaches(
    head: str,
) -> None:
    fresh = of_fresh()
    assert "entropy_collapsed" not in look(fresh)
    assert (
        fresh.head_choices[head] >= AnomalyConfig().min_choices
    )  # it was checked, and passed
    agent = quick(prior=0.0, learning_rate=1e-9)
    saturate(agent, head)
    found = look(learned(agent))["entropy_collapsed"]
    assert [event.head for event in found] == [head]
    assert found[0].measured < found[0].threshold
    assert f"head {head} " in found[0].found


def test_a_policy_may_be_certain_late_in_training() -> None:
    agent = quick(prior=0.0, learning_rate=1e-9)
    saturate(agent, "op")
    stats = learned(agent)
    assert "entropy_collapsed" in look(stats, round_=5)
    assert "entropy_collapsed" not in look(stats, round_=6)


def test_a_head_without_a_choice_has_not_collapsed() -> None:
    """With a single legal slot, the entropy is 0 and carries no information."""

    class OneSlot(Toy):
        def observe(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
            observation, masks = super().observe()
            masks["op_slot"][:, :, 1:] = False
            masks["op"] = masks["op_slot"].any(axis=2)
            return observation, masks

    agent = quick(prior=0.0)
    _, last = play(agent, OneSlot(32), 12)
    stats = agent.update(last)
    assert stats.head_entropies["slot"] == 0
    assert "slot" not in stats.choice_entropies
    assert "slot" not in stats.head_choices
    assert "entropy_collapsed" not in look(stats)


# --- The critic


def test_a_constant_critic_raises_a_warning() -> None:
    agent = quick()
    with torch.no_grad():
        agent.network.value_head[-1].weight.zero_()  # type: ignore[operator, union-attr]
    found = look(learned(agent))
    assert set(found) == {"value_collapsed"}


def test_a_critic_with_large_errors_raises_a_warning() -> None:
    agent = quick(gae_lambda=1.0)  # targets are returns, without the critic
    with torch.no_grad():
        agent.network.value_head[-1].weight.mul_(50)  # type: ignore[operator, union-attr]
    update = learned(agent)
    assert "value_wrong" in look(update)
    # Returns beside those of the others of a group leave little to predict.
    grouped = replace(DETECTOR, grouped=True)
    assert "value_wrong" not in look(update, detector=grouped)


# --- Gradients


class Pays(Toy):
    """A reward that is the same for every action."""

    def __init__(self, envs: int, amount: float) -> None:
        super().__init__(envs)
        self.amount = amount

    def reward(self, action: np.ndarray) -> np.ndarray:
        return np.full(len(action), self.amount)


def test_vanishing_gradients_of_the_agent_raise_a_warning() -> None:
    """No action pays, the critic has learned that, and there is no entropy bonus."""
    agent = quick(16, entropy_start=0.0, entropy_end=0.0)
    with torch.no_grad():
        agent.network.value_head[-1].weight.zero_()  # type: ignore[operator, union-attr]
    _, last = play(agent, Pays(16, 0.0), 12)
    stats = agent.update(last)
    assert stats.gradient_health == 0
    assert "gradient_vanished" in look(stats)


def test_large_gradients_of_the_agent_raise_a_warning() -> None:
    agent = quick(16)
    with torch.no_grad():
        agent.network.value_head[-1].weight.mul_(50)  # type: ignore[operator, union-attr]
    stats = learned(agent)
    (event,) = look(stats)["gradient_exploded"]
    assert stats.clipped_gradients == 1.0
    assert "100% of them clipped" in event.found
    assert event.measured > event.threshold == 20.0


# --- Not finite


def spoiled(agent: PPOAgent, name: str, value: float) -> UpdateStats:
    """A round with one non-finite number."""
    _, last = play(agent, Toy(agent.n_envs), 12)
    step = agent.buffer._steps[5][name]
    step[(0,) * step.ndim] = value
    return agent.update(last)


@pytest.mark.trap(2)
@pytest.mark.parametrize(("name", "value"), [("reward", np.inf), ("raw", np.nan)])
def test_a_number_that_is_not_finite_changes_nothing_and_is_reported(
    name: str, value: float
) -> None:
    agent = quick(4)
    learned(agent)
    before = bits(agent)
    stats = spoiled(agent, name, value)
    assert same(before, bits(agent))
    assert stats.minibatches == 0
    (event,) = look(stats)["not_finite"]
    assert event.measured == 1
    assert set(look(stats)) == {"not_finite"}
    again = learned(agent)  # the agent learns from the next round as usual
    assert again.minibatches > 0
    assert "not_finite" not in look(again)
    assert not same(before, bits(agent))


def test_numbers_of_an_idle_env_do_not_matter() -> None:
    agent, toy = make_agent(4), Toy(4)
    agent.begin()
    idle = np.array([False, False, False, True])
    for step in range(6):
        observation, masks = toy.observe()
        action = agent.act(observation, masks)
        agent.record(
            toy.reward(action),
            np.zeros(4),
            np.full(4, step == 5) | idle,
            np.zeros(4, dtype=bool),
            idle,
            ~idle,
        )
        junk = agent.buffer._steps[-1]["raw"].clone()
        junk[3] = np.nan
        agent.buffer._steps[-1]["raw"] = junk
    stats = agent.update(observation)
    assert stats.broken_steps == 0
    assert stats.minibatches > 0


def break_gradient(agent: PPOAgent, when: Callable[[int], bool]) -> None:
    """Backward passes give NaN at some minibatches, as an overflow does."""
    calls = iter(range(10**6))

    def spoil(grad: torch.Tensor) -> torch.Tensor:
        return torch.full_like(grad, torch.nan) if when(next(calls)) else grad

    agent.network.value_head[-1].bias.register_hook(spoil)  # type: ignore[operator, union-attr]


def test_a_gradient_that_is_not_finite_is_left_out_and_the_others_are_taken() -> None:
    agent = make_agent(4, target_kl=100.0)
    break_gradient(agent, lambda call: call == 2)
    stats = learned(agent)
    assert (stats.minibatches, stats.skipped_minibatches) == (15, 1)
    assert all(bool(p.isfinite().all()) for p in agent.parameters)
    assert np.isfinite(stats.gradient_norm)
    (event,) = look(stats)["not_finite"]
    assert event.measured == 1


def test_no_weight_changes_if_every_gradient_is_broken() -> None:
    agent = make_agent(4)
    before = [p.detach().clone() for p in agent.parameters]
    break_gradient(agent, lambda _call: True)
    stats = learned(agent)
    assert (stats.minibatches, stats.skipped_minibatches) == (0, 16)
    assert same(before, [p.detach() for p in agent.parameters])
    assert not agent.optimizer.state_dict()["state"]  # nor does Adam remember it


def test_a_loss_that_is_not_finite_is_left_out() -> None:
    """A truncated episode with a non-finite final value makes targets non-finite, although every step is finite."""
    agent, toy = make_agent(4), Toy(4)
    _, last = play(agent, toy, 12)
    agent.buffer._steps[3]["truncated"][0] = True
    agent.buffer._steps[3]["final_value"][0] = np.nan
    before = [p.detach().clone() for p in agent.parameters]
    stats = agent.update(last)
    assert stats.broken_steps == 0
    assert stats.minibatches == 0
    assert stats.skipped_minibatches == 16
    assert same(before, [p.detach() for p in agent.parameters])
    assert "not_finite" in look(stats)


# --- The detector itself


def test_figures_that_an_older_log_lacks_raise_no_warning() -> None:
    old = updated(
        ratio_max=None, ratio_min=None, value_std=None, target_std=None, clipped_gradients=None,
        choice_entropies={}, head_choices={}, head_entropies=dict.fromkeys(HEADS, 0.0), explained_variance=-9.0,
    )  # fmt: skip
    assert DETECTOR.look(old) == []


@pytest.mark.finding("L8")
def test_every_limit_is_in_the_configuration() -> None:
    limits = {
        "ratio_high": 1.2, "ratio_low": 0.9, "entropy": 0.95, "entropy_until": 1.0, "min_choices": 1,
        "value_spread": 1.0, "target_spread": 0.5, "critic_after": 0, "explained_variance": 0.0,
        "gradient_small": 1.0, "gradient_large": 1.0,
    }  # fmt: skip
    config = TrainingConfig.parse({"anomaly": limits})
    assert set(limits) == set(AnomalyConfig.model_fields)
    detector = AnomalyDetector(config.anomaly, max_grad_norm=0.5, rounds=1)
    assert DETECTOR.look(updated(round=1)) == []
    kinds = {event.kind for event in detector.look(updated(round=1))}
    assert kinds == set(KINDS) - {"not_finite", "illegal_actions"}
