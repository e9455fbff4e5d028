"""GAE against a reference that follows one env at a time, with terminals, truncations and resets inside sequences."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.agents.ppo.buffer import broken_steps, gae, others_mean

GAMMA, LAM = 0.9, 0.8


def naive(rewards, values, last_value, terminated, truncated, final_values, trained):
    """A_t = Σ_k (γλ)^k δ_{t+k} up to the end of the episode, env by env; k and the γ in δ count epochs."""
    steps, envs = rewards.shape
    advantages = np.zeros((steps, envs))
    for e in range(envs):
        for t in range(steps):
            weight = 1.0
            for k in range(t, steps):
                if terminated[k, e]:
                    after = 0.0
                elif truncated[k, e]:
                    after = final_values[k, e]
                else:
                    after = values[k + 1, e] if k + 1 < steps else last_value[e]
                discount = GAMMA if trained[k, e] else 1.0
                advantages[t, e] += weight * (
                    rewards[k, e] + discount * after - values[k, e]
                )
                if terminated[k, e] or truncated[k, e]:
                    break
                weight *= GAMMA * LAM if trained[k, e] else 1.0
    return advantages


@pytest.mark.finding("M4")
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 12), st.integers(1, 4))
def test_equals_the_reference(seed: int, steps: int, envs: int) -> None:
    draw = np.random.default_rng(seed)
    rewards, values, final = (draw.normal(size=(steps, envs)) for _ in range(3))
    last = draw.normal(size=envs)
    terminated = draw.random((steps, envs)) < 0.2
    truncated = (draw.random((steps, envs)) < 0.2) & ~terminated
    trained = draw.random((steps, envs)) < 0.6
    rollout = (rewards, values, last, terminated, truncated, final, trained)
    advantages, targets = gae(*map(torch.from_numpy, rollout), gamma=GAMMA, lam=LAM)
    expected = naive(*rollout)
    np.testing.assert_allclose(advantages.numpy(), expected, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(
        targets.numpy(), expected + values, rtol=1e-9, atol=1e-12
    )


def one_step(terminated: bool, truncated: bool) -> float:
    flags = [torch.tensor([[flag]]) for flag in (terminated, truncated)]
    ones = torch.ones(1, 1)
    advantages, _ = gae(
        ones,
        2 * ones,
        5 * ones[0],
        *flags,
        final_values=7 * ones,
        trained=ones > 0,
        gamma=0.5,
        lam=1.0,
    )
    return float(advantages)


def test_an_edit_has_the_advantage_of_the_epoch_that_it_precedes() -> None:
    """Two edits with prices and two epochs, of one env; by hand."""
    rewards = torch.tensor([[-0.1], [-0.2], [1.0], [2.0]])
    values = torch.tensor([[0.5], [0.4], [0.3], [0.2]])
    never = torch.zeros(4, 1, dtype=torch.bool)
    advantages, targets = gae(
        rewards,
        values,
        torch.tensor([4.0]),
        never,
        never,
        torch.zeros(4, 1),
        torch.tensor([[False], [False], [True], [True]]),
        gamma=0.5,
        lam=0.5,
    )
    last = 2.0 + 0.5 * 4.0 - 0.2
    third = 1.0 + 0.5 * 0.2 - 0.3 + 0.25 * last
    second = -0.2 + 0.3 - 0.4 + third
    first = -0.1 + 0.4 - 0.5 + second
    expected = torch.tensor([[first], [second], [third], [last]])
    torch.testing.assert_close(advantages, expected)
    # A return of an edit is its price and the return of what follows, whatever the values are in between.
    torch.testing.assert_close(targets[0], rewards[0] + rewards[1] + targets[2])


@pytest.mark.trap(22)
@pytest.mark.parametrize(
    ("terminated", "truncated", "expected"),
    [
        (True, False, 1 - 2),  # a terminal state has no value
        (
            False,
            True,
            1 + 0.5 * 7 - 2,
        ),  # a truncated one has the value of the state it stopped in
        (False, False, 1 + 0.5 * 5 - 2),  # a running one that of the next state
    ],
)
def test_a_fixed_horizon_is_terminal_and_truncation_bootstraps(
    terminated: bool, truncated: bool, expected: float
) -> None:
    assert one_step(terminated, truncated) == pytest.approx(expected)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(
    "name", ["reward", "raw", "value", "log_prob", "unscaled", "observation"]
)
def test_a_step_with_a_number_that_is_not_finite_is_broken(
    name: str, value: float
) -> None:
    rollout = {key: torch.zeros(3, 2) for key in ("reward", "value", "log_prob")}
    rollout["unscaled"] = torch.zeros(3, 2)
    rollout |= {key: torch.zeros(3, 2, 5) for key in ("raw", "observation")}
    rollout[name][1, 0] = value
    assert broken_steps(rollout).nonzero().tolist() == [[1, 0]]


def test_the_return_of_the_others_in_a_group_is_taken_off() -> None:
    rewards = torch.tensor([[1.0, 2.0, 0.0, 4.0], [0.0, 1.0, 5.0, 0.0]])
    assert others_mean(rewards, 2).tolist() == [3.0, 1.0, 4.0, 5.0]
    assert others_mean(rewards, 4).tolist() == pytest.approx([4.0, 10 / 3, 8 / 3, 3.0])
    assert others_mean(rewards, 1).tolist() == [0.0] * 4
