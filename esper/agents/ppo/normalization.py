"""Running statistics for normalising observations and rewards.

Only the agent's thread uses them. They are frozen during a round and updated once after it, so that a replayed round
sees exactly the inputs that the policy acted on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from esper.config import PPOConfig
from esper.core.observation import BASE, PER_CHOICE, PER_SLOT, FeatureKind, split

MIN_VARIANCE = 1e-8
"""Variance above which an entry of the observation is normalised."""
SIZES = [len(BASE), len(PER_SLOT), len(PER_CHOICE)]
"""Number of entries of the host, of a slot, and of a (slot, blueprint)."""


class RunningMeanStd:
    """Running mean and variance of each entry of a vector [D].

    The first ``warm_updates`` updates are cumulative (Chan et al. 1979, the parallel form); later ones are an
    exponential moving average with weight 1 − ``decay``, whose variance includes the shift of the mean:
    var ← m·var + (1−m)·var_b + m(1−m)(mean − mean_b)².
    """

    def __init__(
        self,
        size: int,
        device: torch.device,
        config: PPOConfig,
    ) -> None:
        self.mean = torch.zeros(size, dtype=torch.float64, device=device)
        self.var = torch.ones(size, dtype=torch.float64, device=device)
        self.count = 0.0
        self.updates = 0
        self.warm_updates = config.observation_warm_updates
        self.decay = config.observation_decay

    def merge(self, *groups: Tensor) -> None:
        """Adds rows [N, D], or in groups of columns with different numbers of rows; N = 0 changes nothing.

        ``count`` counts the rows of the first group.
        """
        if len(groups[0]) == 0:
            return
        means = []
        variances = []
        for group in groups:
            rows = group.double()
            means.append(rows.mean(dim=0))
            variances.append(rows.var(dim=0, unbiased=False))
        total = self.count + len(groups[0])
        # Weight of the statistics so far: their share of all rows, later a constant.
        kept = self.decay
        if self.updates < self.warm_updates:
            kept = self.count / total
        shift = torch.cat(means) - self.mean
        added = 1 - kept
        self.var = kept * self.var + added * torch.cat(variances) + kept * added * shift**2
        self.mean = self.mean + added * shift
        self.count = total
        self.updates += 1

    def state_dict(self) -> dict[str, Tensor]:
        counts = torch.tensor([self.count, self.updates], dtype=torch.float64)
        return {"mean": self.mean, "var": self.var, "counts": counts}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.mean = state["mean"].to(self.mean)
        self.var = state["var"].to(self.var)
        self.count = float(state["counts"][0])
        self.updates = int(state["counts"][1])


class ObservationStatistics(RunningMeanStd):
    """Statistics of observations of hosts with ``slots`` slots.

    Each base entry has its own mean and variance; each slot entry has one, pooled over all slots, and so has each entry
    of a (slot, blueprint). So there are as many of them for any number of slots and blueprints. ``count`` counts
    observations. Only continuous entries are normalised.
    """

    def __init__(
        self,
        slots: int,
        device: torch.device,
        config: PPOConfig,
    ) -> None:
        self.slots = slots
        entries = (*BASE, *PER_SLOT, *PER_CHOICE)
        kinds = [entry.kind for entry in entries]
        super().__init__(len(kinds), device, config)
        self.clip = config.observation_clip
        self.continuous = torch.tensor([kind is FeatureKind.CONTINUOUS for kind in kinds], device=device)
        self.index = torch.tensor([kind is FeatureKind.INDEX for kind in kinds], device=device)
        scales = torch.tensor([(entry.typical, entry.spread) for entry in entries], device=device)
        self.typical = scales[:, 0]
        self.spread = scales[:, 1]

    def update(self, batch: Tensor) -> None:
        """Adds raw observations [N, size]; N = 0 changes nothing."""
        base, slots, choices = split(batch, self.slots)
        self.merge(
            base,
            slots.flatten(0, -2),
            choices.flatten(0, -2),
        )

    def normalize(self, x: Tensor) -> Tensor:
        """(x − mean) / std, clipped to ±``clip``, for the continuous entries of raw observations, and
        (x − typical) / spread for the others; float32.

        An entry that has never varied, except an index, is 0: nothing was learned of it, so a policy must not act on it
        when it meets another value, such as the size of another host.
        """
        _, _, choices = split(x, self.slots)
        blueprints = choices.shape[-2]

        def like_x(values: Tensor) -> Tensor:
            base, slot, choice = torch.split(values, SIZES)
            parts = (
                base,
                slot.repeat(self.slots),
                choice.repeat(self.slots * blueprints),
            )
            return torch.cat(parts)

        mean = like_x(self.mean.float())
        std = like_x(torch.sqrt(self.var + MIN_VARIANCE).float())
        kept = like_x((self.var > MIN_VARIANCE) | self.index)
        scaled = ((x - mean) / std).clamp(-self.clip, self.clip)
        fixed = (x - like_x(self.typical)) / like_x(self.spread)
        values = torch.where(like_x(self.continuous), scaled, fixed)
        return torch.where(kept, values, 0.0)


class RewardNormalizer(RunningMeanStd):
    """Divides rewards by the running standard deviation of discounted returns (at least ``floor``), without a shift."""

    def __init__(self, device: torch.device, config: PPOConfig) -> None:
        super().__init__(1, device, config)
        self.gamma = config.gamma
        self.floor = config.reward_std_floor

    @property
    def scale(self) -> float:
        """The current divisor of rewards; 1 before the first update."""
        if not self.updates:
            return 1.0
        return max(float(self.var.sqrt()), self.floor)

    def update(
        self,
        rewards: Tensor,
        ends: Tensor,
        valid: Tensor,
        trained: Tensor,
    ) -> None:
        """Adds a rollout: rewards [T, E]; episode ends, valid steps, and steps that trained an epoch, bool [T, E].

        Returns are discounted and counted by epochs.
        """
        running = torch.zeros_like(rewards[0])
        seen = []
        # No time passes in a step that trains nothing.
        discounts = torch.ones_like(rewards)
        discounts[trained] = self.gamma
        counted = valid & trained
        steps = zip(
            rewards,
            discounts,
            ends,
            counted,
            strict=True,
        )
        for reward, discount, end, counts in steps:
            running = running * discount + reward
            seen.append(running[counts])  # idle envs do not count
            running = torch.where(end, 0.0, running)
        self.merge(torch.cat(seen)[:, None])
