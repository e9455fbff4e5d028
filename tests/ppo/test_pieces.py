"""The small parts of PPO: choices, uniform numbers by counter, the LSTM over sequences, the loss."""

import math

import numpy as np
import pytest
import torch

from esper.config import PPOConfig
from esper.ppo.distribution import MASKED_LOGIT, MaskedCategorical, counter_uniforms
from esper.ppo.network import SequenceLSTM
from esper.ppo.update import PolicyOutput, UpdateStats, gradient_health, ppo_loss, reduce, update_policy


def test_samples_follow_the_probabilities_and_are_always_legal() -> None:
    legal = torch.tensor([True, False, True, True])
    logits = torch.tensor([0.0, 50.0, 1.0, 2.0])
    options = MaskedCategorical(logits.expand(20_000, 4), legal.expand(20_000, 4))
    uniforms = torch.from_numpy(np.random.default_rng(0).random(20_000))
    counts = torch.bincount(options.sample(uniforms), minlength=4) / 20_000
    weights = torch.tensor([1.0, 0.0, math.e, math.e**2])
    torch.testing.assert_close(counts, weights / weights.sum(), atol=0.015, rtol=0)
    assert counts[1] == 0


@pytest.mark.trap(19)
def test_an_unlikely_choice_has_no_floor() -> None:
    """Every head is made of these: a choice that was learned to be wrong is as good as never taken."""
    logits = torch.tensor([0.0, -30.0, 1.0])
    options = MaskedCategorical(logits.expand(20_000, 3), torch.ones(20_000, 3, dtype=torch.bool))
    assert float(options.log_probs[0, 1].exp()) < 1e-12
    uniforms = torch.from_numpy(np.random.default_rng(0).random(20_000))
    assert int((options.sample(uniforms) == 1).sum()) == 0


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
def test_a_single_legal_choice_is_taken_whatever_the_draw(uniform: float) -> None:
    for place in range(3):
        legal = torch.zeros(1, 3, dtype=torch.bool)
        legal[0, place] = True
        options = MaskedCategorical(torch.randn(1, 3), legal)
        assert options.sample(torch.tensor([uniform], dtype=torch.float64)).item() == place
        assert options.normalized_entropy().item() == 0.0


def test_normalised_entropy_is_one_for_uniform_choices() -> None:
    legal = torch.tensor([[True, True, False], [True, True, True]])
    entropy = MaskedCategorical(torch.zeros(2, 3), legal).normalized_entropy()
    torch.testing.assert_close(entropy, torch.ones(2))


def test_masked_logits_stay_finite_in_reduced_precision() -> None:
    logits = torch.randn(2, 3, dtype=torch.bfloat16, requires_grad=True)
    options = MaskedCategorical(logits, torch.tensor([[True, False, True]] * 2))
    options.log_prob(torch.tensor([0, 2])).sum().backward()
    assert options.log_probs.dtype is torch.float32
    assert torch.isfinite(logits.grad).all()


@pytest.mark.finding("G1")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_illegal_choice_breaks_no_gradient(dtype: torch.dtype) -> None:
    """Its logit is −1e4 and not −∞, of which 0 · ∞ would come in the gradient of the entropy."""
    assert MASKED_LOGIT == -1e4
    logits = torch.randn(2, 3, dtype=dtype, requires_grad=True)
    options = MaskedCategorical(logits, torch.tensor([[True, False, True]] * 2))
    (options.normalized_entropy().sum() + options.log_prob(torch.tensor([0, 2])).sum()).backward()
    assert options.log_probs[:, 1].exp().tolist() == [0.0, 0.0]
    assert logits.grad is not None
    assert bool(logits.grad.isfinite().all())
    assert logits.grad[:, 1].tolist() == [0.0, 0.0]


def test_uniforms_depend_on_their_counters_only() -> None:
    env, episode, step = (np.arange(4) for _ in range(3))
    draws = counter_uniforms(7, env, episode, step, 8)
    np.testing.assert_array_equal(draws[2:3], counter_uniforms(7, env[2:3], episode[2:3], step[2:3], 8))
    assert not np.array_equal(draws, counter_uniforms(8, env, episode, step, 8))


def test_uniforms_are_uniform_and_uncorrelated() -> None:
    env = np.repeat(np.arange(100), 100)
    step = np.tile(np.arange(100), 100)
    draws = counter_uniforms(0, env, np.zeros_like(env), step, 8)
    assert len(np.unique(draws)) == draws.size
    np.testing.assert_allclose(np.histogram(draws, bins=10, range=(0, 1))[0] / draws.size, 0.1, atol=0.005)
    correlation = np.corrcoef(np.concatenate((draws, np.roll(draws, 1, axis=0)), axis=1).T)
    assert np.abs(correlation - np.eye(16)).max() < 0.06


def test_lstm_over_a_sequence_equals_steps_with_resets() -> None:
    torch.manual_seed(0)
    lstm = SequenceLSTM(6)
    x, starts = torch.randn(9, 3, 6), torch.rand(9, 3) < 0.3
    state = (torch.randn(3, 6), torch.randn(3, 6))
    whole, last = lstm(x, state, starts)
    for t in range(9):
        step, state = lstm(x[t : t + 1], state, starts[t : t + 1])
        torch.testing.assert_close(step[0], whole[t])
    torch.testing.assert_close(state[0], last[0])
    torch.testing.assert_close(state[1], last[1])


def test_an_episode_start_forgets_what_came_before() -> None:
    torch.manual_seed(0)
    lstm = SequenceLSTM(4)
    x = torch.randn(6, 1, 4)
    starts = torch.tensor([False, False, False, True, False, False])[:, None]
    other = torch.cat((torch.randn(3, 1, 4), x[3:]))
    zeros = lstm.initial_state(1, torch.device("cpu"))
    torch.testing.assert_close(lstm(x, zeros, starts)[0][3:], lstm(other, zeros, starts)[0][3:])


def loss_at(ratio: float, advantage: float, free: bool = True) -> float:
    one = torch.ones(1, 1)
    now = PolicyOutput(value=one, log_prob=math.log(ratio) * one, entropies=torch.zeros(1, 1, 8))
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
@pytest.mark.parametrize(("envs", "minibatches", "parts"), [(8, 4, 4), (5, 2, 2), (3, 4, 3), (1, 4, 1)])
def test_an_update_passes_over_whole_sequences_several_times(envs: int, minibatches: int, parts: int) -> None:
    """Each pass has every env in exactly one of its minibatches, with all steps of its sequence, in a new order."""
    steps, seen = 6, list[list[int]]()
    value = torch.nn.Parameter(torch.zeros(()))

    def evaluate(chosen: torch.Tensor) -> PolicyOutput:
        seen.append(chosen.tolist())
        now = value.expand(steps, len(chosen))
        return PolicyOutput(now, 0 * now, torch.zeros(steps, len(chosen), 8))

    numbers = {name: torch.rand(steps, envs) for name in ("value", "advantage", "target")}
    flags = {name: torch.ones(steps, envs, dtype=torch.bool) for name in ("valid", "free")}
    rollout = {**numbers, **flags, "log_prob": torch.zeros(steps, envs)}
    config = PPOConfig(update_epochs=3, n_minibatches=minibatches)
    optimizer = torch.optim.SGD([value], lr=0.1)
    stats = update_policy([value], optimizer, evaluate, rollout, config, 0.0, torch.Generator().manual_seed(0))
    assert stats.minibatches == len(seen) == 3 * parts
    passes = [seen[first : first + parts] for first in range(0, 3 * parts, parts)]
    for one in passes:
        assert sorted(env for part in one for env in part) == list(range(envs))
        assert max(map(len, one)) - min(map(len, one)) <= 1
    assert envs == 1 or passes[0] != passes[1]


@pytest.mark.finding("L7")
@pytest.mark.parametrize(
    ("norm", "health"), [(1.0, 1.0), (0.01, 1.0), (100.0, 1.0), (1e3, 0.5), (1e-3, 0.5), (1e4, 0.0), (1e-9, 0.0)]
)
def test_gradient_health_is_continuous(norm: float, health: float) -> None:
    assert gradient_health(norm) == pytest.approx(health)
    assert gradient_health(norm * 1.0001) == pytest.approx(health, abs=1e-3)


@pytest.mark.finding("L7")
def test_gradient_health_has_no_jump_at_any_norm() -> None:
    """Between neighbours on a fine scale it differs by their distance in decades at most."""
    decades = np.linspace(-8, 8, 16_001)
    health = np.array([gradient_health(10.0**decade) for decade in decades])
    assert np.abs(np.diff(health)).max() <= np.diff(decades).max()
    assert (health[decades <= 0] == np.maximum.accumulate(health[decades <= 0])).all()
    assert (health[decades >= 0] == np.minimum.accumulate(health[decades >= 0])).all()
    assert {0.0, 1.0} < set(health.tolist())


def test_gradient_health_of_a_broken_gradient_is_zero() -> None:
    assert gradient_health(math.nan) == gradient_health(math.inf) == gradient_health(0.0) == 0.0


@pytest.mark.parametrize(
    ("minibatches", "stopped", "mean"), [(0, True, 6.0), (2, True, 2.0), (3, False, 2.0), (0, False, math.nan)]
)
def test_the_means_of_an_update_are_over_what_was_measured(minibatches: int, stopped: bool, mean: float) -> None:
    """Also where the first minibatch stops it, and where all were left out."""
    told = {"valid": torch.ones(2, 2, dtype=torch.bool), "target": torch.rand(2, 2), "value": torch.rand(2, 2)}
    stats = reduce(UpdateStats(policy_loss=6.0, entropy=6.0, minibatches=minibatches, stopped_early=stopped), told)
    assert [stats.policy_loss, stats.entropy] == pytest.approx([mean, mean], nan_ok=True)
