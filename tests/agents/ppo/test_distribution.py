"""Masked choices and uniform numbers by counter."""

import math

import numpy as np
import pytest
import torch

from esper.agents.ppo.network import (
    MASKED_LOGIT,
    MaskedCategorical,
    counter_uniforms,
)


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
    """Every head uses this distribution: a choice that was learned to be wrong is practically never taken."""
    logits = torch.tensor([0.0, -30.0, 1.0])
    options = MaskedCategorical(
        logits.expand(20_000, 3), torch.ones(20_000, 3, dtype=torch.bool)
    )
    assert float(options.log_probs[0, 1].exp()) < 1e-12
    uniforms = torch.from_numpy(np.random.default_rng(0).random(20_000))
    assert int((options.sample(uniforms) == 1).sum()) == 0


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
def test_a_single_legal_choice_is_taken_whatever_the_draw(uniform: float) -> None:
    for place in range(3):
        legal = torch.zeros(1, 3, dtype=torch.bool)
        legal[0, place] = True
        options = MaskedCategorical(torch.randn(1, 3), legal)
        assert (
            options.sample(torch.tensor([uniform], dtype=torch.float64)).item() == place
        )
        assert options.normalized_entropy().item() == 0.0


def test_normalised_entropy_is_one_for_uniform_choices() -> None:
    legal = torch.tensor([[True, True, False], [True, True, True]])
    entropy = MaskedCategorical(torch.zeros(2, 3), legal).normalized_entropy()
    torch.testing.assert_close(entropy, torch.ones(2))


@pytest.mark.finding("G1")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_illegal_choice_breaks_no_gradient(dtype: torch.dtype) -> None:
    """Its logit is −1e4 instead of −∞, which would give 0 · ∞ in the gradient of the entropy."""
    assert MASKED_LOGIT == -1e4
    logits = torch.randn(2, 3, dtype=dtype, requires_grad=True)
    options = MaskedCategorical(logits, torch.tensor([[True, False, True]] * 2))
    (
        options.normalized_entropy().sum()
        + options.log_prob(torch.tensor([0, 2])).sum()
    ).backward()
    assert options.log_probs[:, 1].exp().tolist() == [0.0, 0.0]
    assert logits.grad is not None
    assert bool(logits.grad.isfinite().all())
    assert logits.grad[:, 1].tolist() == [0.0, 0.0]


def test_uniforms_depend_on_their_counters_only() -> None:
    env, episode, step = (np.arange(4) for _ in range(3))
    draws = counter_uniforms(7, env, episode, step, 8)
    np.testing.assert_array_equal(
        draws[2:3], counter_uniforms(7, env[2:3], episode[2:3], step[2:3], 8)
    )
    assert not np.array_equal(draws, counter_uniforms(8, env, episode, step, 8))


def test_uniforms_are_uniform_and_uncorrelated() -> None:
    env = np.repeat(np.arange(100), 100)
    step = np.tile(np.arange(100), 100)
    draws = counter_uniforms(0, env, np.zeros_like(env), step, 8)
    assert len(np.unique(draws)) == draws.size
    np.testing.assert_allclose(
        np.histogram(draws, bins=10, range=(0, 1))[0] / draws.size, 0.1, atol=0.005
    )
    correlation = np.corrcoef(
        np.concatenate((draws, np.roll(draws, 1, axis=0)), axis=1).T
    )
    assert np.abs(correlation - np.eye(16)).max() < 0.06
