"""The clipped loss, passes over minibatches, and the statistics of an update."""

import math

import pytest
import torch

from esper.agents.ppo.update import (
    MEASURED,
    PolicyOutput,
    UpdateStats,
    gradient_health,
    imitation_loss,
    ppo_loss,
    reduce,
    update_policy,
)
from esper.config import PPOConfig

HEALTHY = PPOConfig().healthy_gradients


def loss_at(ratio: float, advantage: float, free: bool = True) -> float:
    one = torch.ones(1, 1)
    now = PolicyOutput(
        value=one, log_prob=math.log(ratio) * one, entropies=torch.zeros(1, 1, 8)
    )
    part = {
        "log_prob": 0 * one,
        "value": one,
        "advantage": advantage * one,
        "target": one,
        "valid": one.bool(),
        "free": torch.tensor([[free]]),
    }
    return float(ppo_loss(now, part, PPOConfig(clip=0.2), 0.0)[0])


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.1, 2.0, -2.2),  # inside the clip range
        (1.5, 2.0, -2.4),  # a gain is clipped at 1 + ε
        (0.5, 2.0, -1.0),  # a loss is not
        (0.5, -2.0, 1.6),  # 1 − ε
        (1.5, -2.0, 3.0),
    ],
)
def test_clipped_objective(ratio: float, advantage: float, expected: float) -> None:
    assert loss_at(ratio, advantage) == pytest.approx(expected, rel=1e-5)


def test_steps_without_a_choice_carry_no_actor_loss() -> None:
    assert loss_at(1.5, -2.0, free=False) == 0.0


@pytest.mark.finding("M3")
@pytest.mark.parametrize(
    ("envs", "minibatches", "parts"), [(8, 4, 4), (5, 2, 2), (3, 4, 3), (1, 4, 1)]
)
def test_an_update_passes_over_whole_sequences_several_times(
    envs: int, minibatches: int, parts: int
) -> None:
    """Each pass has every env in exactly one of its minibatches, with all steps of its sequence, in a new order."""
    steps, seen = 6, list[list[int]]()
    value = torch.nn.Parameter(torch.zeros(()))

    def evaluate(chosen: torch.Tensor) -> PolicyOutput:
        seen.append(chosen.tolist())
        now = value.expand(steps, len(chosen))
        return PolicyOutput(now, 0 * now, torch.zeros(steps, len(chosen), 8))

    numbers = {
        name: torch.rand(steps, envs) for name in ("value", "advantage", "target")
    }
    flags = {
        name: torch.ones(steps, envs, dtype=torch.bool) for name in ("valid", "free")
    }
    rollout = {**numbers, **flags, "log_prob": torch.zeros(steps, envs)}
    config = PPOConfig(update_epochs=3, n_minibatches=minibatches)
    optimizer = torch.optim.SGD([value], lr=0.1)
    stats = update_policy(
        [value],
        optimizer,
        evaluate,
        rollout,
        config,
        0.0,
        torch.Generator().manual_seed(0),
        ppo_loss,
    )
    assert stats.minibatches == len(seen) == 3 * parts
    passes = [seen[first : first + parts] for first in range(0, 3 * parts, parts)]
    for one in passes:
        assert sorted(env for part in one for env in part) == list(range(envs))
        assert max(map(len, one)) - min(map(len, one)) <= 1
    assert envs == 1 or passes[0] != passes[1]


@pytest.mark.finding("L7")
@pytest.mark.parametrize(
    ("norm", "health"),
    [
        (1.0, 1.0),
        (0.01, 1.0),
        (100.0, 1.0),
        (1e3, 0.5),
        (1e-3, 0.5),
        (1e4, 0.0),
        (1e-9, 0.0),
    ],
)
def test_gradient_health_is_continuous(norm: float, health: float) -> None:
    assert gradient_health(norm, HEALTHY) == pytest.approx(health)
    assert gradient_health(norm * 1.0001, HEALTHY) == pytest.approx(health, abs=1e-3)


def test_gradient_health_of_a_broken_gradient_is_zero() -> None:
    assert (
        gradient_health(math.nan, HEALTHY)
        == gradient_health(math.inf, HEALTHY)
        == gradient_health(0.0, HEALTHY)
        == 0.0
    )


@pytest.mark.parametrize(
    ("minibatches", "stopped", "mean"),
    [(0, True, 6.0), (2, True, 2.0), (3, False, 2.0), (0, False, math.nan)],
)
def test_the_means_of_an_update_are_over_what_was_measured(
    minibatches: int, stopped: bool, mean: float
) -> None:
    """This holds if the first minibatch stops the update, and if all were skipped."""
    rollout = {
        "valid": torch.ones(2, 2, dtype=torch.bool),
        "target": torch.rand(2, 2),
        "value": torch.rand(2, 2),
    }
    stats = reduce(
        UpdateStats(
            policy_loss=6.0, entropy=6.0, minibatches=minibatches, stopped_early=stopped
        ),
        rollout,
        HEALTHY,
    )
    assert [stats.policy_loss, stats.entropy] == pytest.approx(
        [mean, mean], nan_ok=True
    )


def test_imitation_raises_the_probability_of_what_was_shown() -> None:
    """Neither the advantage nor the entropy bonus counts, and no step without a choice."""
    log_prob = torch.tensor([[-2.0, -1.0, -5.0]], requires_grad=True)
    value = torch.tensor([[1.0, 2.0, 3.0]], requires_grad=True)
    now = PolicyOutput(value=value, log_prob=log_prob, entropies=torch.ones(1, 3, 8))
    part = {
        "advantage": torch.full((1, 3), torch.nan),
        "target": torch.zeros(1, 3),
        "valid": torch.tensor([[True, True, False]]),
        "free": torch.tensor([[True, False, True]]),
    }
    loss, measured = imitation_loss(now, part, PPOConfig(value_coefficient=0.5), 10.0)
    assert float(loss.detach()) == pytest.approx(2.0 + 0.5 * 0.5 * (1 + 4) / 2)
    loss.backward()  # type: ignore[no-untyped-call]
    assert log_prob.grad is not None
    assert log_prob.grad.tolist() == [[-1.0, 0.0, 0.0]]
    assert set(MEASURED) == set(measured)
    assert (
        measured["approx_kl"] == 0.0
    )  # a teacher's policy is not its own, so an update never stops early
