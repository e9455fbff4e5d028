"""Generalised advantage estimation (Schulman et al. 2016), vectorised over envs; termination and truncation differ."""

from __future__ import annotations

import torch
from torch import Tensor


def gae(
    rewards: Tensor,
    values: Tensor,
    last_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    final_values: Tensor,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Returns advantages and value targets, both [T, E].

    δ_t = r_t + γ V(s_{t+1}) − V(s_t);  A_t = δ_t + γλ A_{t+1}; A_{t+1} is 0 across the end of an episode.

    Args:
        rewards: [T, E].
        values: V(s_t) [T, E].
        last_value: V(s_T) [E], for episodes still running at the end of the rollout.
        terminated: [T, E] bool; in these steps V(s_{t+1}) is 0.
        truncated: [T, E] bool; in these steps V(s_{t+1}) is taken from ``final_values``.
        final_values: [T, E], V of the state in which a truncated episode stopped; read only in truncated steps.
        gamma: the discount γ.
        lam: λ.
    """
    advantages = torch.zeros_like(rewards)
    following = torch.zeros_like(last_value)
    next_value = last_value
    for t in range(len(rewards) - 1, -1, -1):
        ended = terminated[t] | truncated[t]
        bootstrap = torch.where(terminated[t], 0.0, torch.where(truncated[t], final_values[t], next_value))
        delta = rewards[t] + gamma * bootstrap - values[t]
        following = delta + gamma * lam * torch.where(ended, 0.0, following)
        advantages[t] = following
        next_value = values[t]
    return advantages, advantages + values
