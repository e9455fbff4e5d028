"""The rollout buffer: the steps of a round, as the policy saw them, and what the update computes from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from esper.agents.ppo.network import FREE_HEADS, State, row_at

MASK_NAMES = ("op", "op_slot", "slot_blueprint", *FREE_HEADS)


class RolloutBuffer:
    """Steps of E envs in chronological order; :meth:`stack` makes tensors [T, E, ...].

    Observations are kept both raw, for the running statistics, and normalised, as the policy saw them.
    """

    def __init__(self) -> None:
        self._steps: list[dict[str, Tensor]] = []
        self._masks: list[Mapping[str, Tensor]] = []
        self.initial_state: State | None = None

    def __len__(self) -> int:
        return len(self._steps)

    def add(
        self,
        state: State,
        masks: Mapping[str, Tensor],
        **step: Tensor,
    ) -> None:
        """Appends one step of all envs; ``state`` is the recurrent state before it. Only the first state is kept."""
        if self.initial_state is None:
            hidden, cell = state
            self.initial_state = (hidden.clone(), cell.clone())
        self._masks.append({name: masks[name] for name in MASK_NAMES})
        self._steps.append(step)

    def amend(self, **values: Tensor) -> None:
        """Adds values to the last step that are known only after it was executed, such as rewards and ends."""
        self._steps[-1].update(values)

    def stack(self) -> tuple[dict[str, Tensor], dict[str, Tensor], State]:
        """Returns the steps and the masks by name, each [T, E, ...], and the recurrent state before the first step.

        Raises ValueError if there are no steps.
        """
        if self.initial_state is None:
            raise ValueError("the buffer has no steps")
        steps = _stacked(self._steps)
        masks = _stacked(self._masks)
        return steps, masks, self.initial_state

    def state_dict(self) -> dict[str, Any]:
        """Returns the steps stored so far, for updates that learn from several rounds."""
        return {
            "steps": self._steps,
            "masks": self._masks,
            "initial": self.initial_state,
        }

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Restores :meth:`state_dict` on ``device``."""

        def moved(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: tensor.to(device) for name, tensor in tensors.items()}

        self._steps = list(map(moved, state["steps"]))
        self._masks = list(map(moved, state["masks"]))
        self.initial_state = None
        if state["initial"] is not None:
            hidden, cell = state["initial"]
            self.initial_state = (hidden.to(device), cell.to(device))

    def clear(self) -> None:
        self._steps.clear()
        self._masks.clear()
        self.initial_state = None


def _stacked(steps: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Joins the tensors [E, ...] of T steps by name, [T, E, ...]."""
    stacked = {}
    for name in steps[0]:
        values = [step[name] for step in steps]
        stacked[name] = torch.stack(values)
    return stacked


def gae(
    rewards: Tensor,
    values: Tensor,
    last_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    final_values: Tensor,
    trained: Tensor,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Returns generalised advantage estimates (Schulman et al. 2016) and value targets, both [T, E].

    δ_t = r_t + γ V(s_{t+1}) − V(s_t);  A_t = δ_t + γλ A_{t+1}; A_{t+1} is 0 across the end of an episode. In a step
    that trained nothing, γ and λ are 1: no time passes, so returns count epochs however many decisions they have.

    Args:
        rewards: [T, E].
        values: V(s_t) [T, E].
        last_value: V(s_T) [E], for episodes still running at the end of the rollout.
        terminated: [T, E] bool; in these steps V(s_{t+1}) is 0.
        truncated: [T, E] bool; in these steps V(s_{t+1}) is taken from ``final_values``.
        final_values: [T, E], V of the state in which a truncated episode stopped; read only in truncated steps.
        trained: [T, E] bool; whether an epoch was trained in these steps.
        gamma: the discount γ of an epoch.
        lam: λ of an epoch.
    """
    discounts = torch.ones_like(rewards)
    decays = torch.ones_like(rewards)
    discounts[trained] = gamma
    decays[trained] = gamma * lam
    advantages = torch.zeros_like(rewards)
    following = torch.zeros_like(last_value)
    next_value = last_value
    for t in reversed(range(len(rewards))):  # each advantage needs the one after it
        ended = terminated[t] | truncated[t]
        bootstrap = torch.where(truncated[t], final_values[t], next_value)
        bootstrap = torch.where(terminated[t], 0.0, bootstrap)
        delta = rewards[t] + discounts[t] * bootstrap - values[t]
        following = delta + decays[t] * torch.where(ended, 0.0, following)
        advantages[t] = following
        next_value = values[t]
    return advantages, advantages + values


def broken_steps(rollout: Mapping[str, Tensor]) -> Tensor:
    """Marks steps, bool [T, E], with a non-finite number in the observation, log-probability, value or reward."""
    finite = rollout["raw"].isfinite().all(dim=-1)
    for name in ("observation", "log_prob", "value", "reward", "unscaled"):
        values = rollout[name].isfinite()
        if values.ndim > finite.ndim:
            values = values.all(dim=-1)
        finite = finite & values
    return ~finite


def legal_options(action: Tensor, masks: Mapping[str, Tensor]) -> Tensor:
    """Counts the legal choices of each head, int64 [T, E, 8], given the earlier heads of ``action`` [T, E, 8]."""
    op = action[..., 0]
    slot = action[..., 1]
    legal = [
        masks["op"],
        row_at(masks["op_slot"], op),
        row_at(masks["slot_blueprint"], slot),
    ]
    legal += [masks[head] for head in FREE_HEADS]
    counts = [options.sum(dim=-1) for options in legal]
    return torch.stack(counts, dim=-1)


def others_mean(rewards: Tensor, group: int) -> Tensor:
    """Returns for each env the mean return of the other members of its group, [E]; 0 in groups of one.

    ``rewards`` [T, E] are those of one episode in each env. A group is ``group`` consecutive envs.
    """
    returns = rewards.sum(dim=0)
    if group == 1:
        return torch.zeros_like(returns)
    of_groups = returns.view(-1, group)
    others = of_groups.sum(dim=1, keepdim=True) - of_groups
    return (others / (group - 1)).flatten()
