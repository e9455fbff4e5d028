"""The PPO update (Schulman et al. 2017): several epochs over sequences in minibatches, clipped, with a KL stop."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from esper.config import PPOConfig
from esper.ppo.buffer import env_minibatches


@dataclass(frozen=True)
class Evaluated:
    """The policy now on a part of the rollout: values, joint log-probabilities [T, E] and entropies [T, E, heads]."""

    value: Tensor
    log_prob: Tensor
    entropies: Tensor


@dataclass
class UpdateStats:
    """What is reported of an update, under the names that dashboards know."""

    policy_loss: float = 0.0
    value_loss: float = 0.0
    entropy: float = 0.0
    approx_kl: float = 0.0
    clip_fraction: float = 0.0
    explained_variance: float = 0.0
    gradient_norm: float = 0.0
    gradient_health: float = 0.0
    learning_rate: float = 0.0
    entropy_coefficient: float = 0.0
    reward_scale: float = 1.0
    minibatches: int = 0
    stopped_early: bool = False
    head_entropies: dict[str, float] = field(default_factory=dict)
    ratio_max: float = 1.0
    ratio_min: float = 1.0
    value_std: float = 0.0
    target_std: float = 0.0
    clipped_gradients: float = 0.0
    skipped_minibatches: int = 0
    broken_steps: int = 0
    choice_entropies: dict[str, float] = field(default_factory=dict)
    head_choices: dict[str, int] = field(default_factory=dict)

    def add(self, measured: Mapping[str, float]) -> None:
        """Take in one minibatch; :func:`finish` makes means of the sums."""
        for name in ("policy_loss", "value_loss", "entropy", "clip_fraction"):
            setattr(self, name, getattr(self, name) + measured[name])
        self.approx_kl = measured["approx_kl"]
        self.ratio_max = max(self.ratio_max, measured["ratio_max"])
        self.ratio_min = min(self.ratio_min, measured["ratio_min"])

    @classmethod
    def of_nothing(cls, broken_steps: int, learning_rate: float, entropy_coefficient: float) -> UpdateStats:
        """An update that was left out: what it would have measured is NaN."""
        names = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "explained_variance")
        stats = cls(learning_rate=learning_rate, entropy_coefficient=entropy_coefficient, broken_steps=broken_steps)
        for name in (*names, "gradient_norm"):
            setattr(stats, name, math.nan)
        return stats


Evaluate = Callable[[Tensor], Evaluated]


def update(
    parameters: list[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    evaluate: Evaluate,
    rollout: Mapping[str, Tensor],
    config: PPOConfig,
    entropy_coefficient: float,
    generator: torch.Generator,
) -> UpdateStats:
    """Improve the policy on one rollout.

    A minibatch whose loss or gradient is not finite is left out: the weights stay as they were, and it is counted.

    Args:
        evaluate: the policy now on the sequences of some envs, given their indices.
        rollout: ``log_prob``, ``value``, ``advantage``, ``target`` [T, E]; ``valid`` [T, E], steps that count at all;
            ``free`` [T, E], steps with a choice to learn from. Where only one action was legal there is no actor loss.
    """
    stats = UpdateStats(entropy_coefficient=entropy_coefficient, learning_rate=optimizer.param_groups[0]["lr"])
    advantage = standardize(rollout["advantage"], rollout["valid"] & rollout["free"])
    envs = advantage.shape[1]
    for _ in range(config.update_epochs):
        for chosen in env_minibatches(envs, config.n_minibatches, generator):
            part = {name: values[:, chosen] for name, values in rollout.items()}
            part["advantage"] = advantage[:, chosen]
            now = evaluate(chosen)
            loss, measured = loss_of(now, part, config, entropy_coefficient)
            stops = measured["approx_kl"] > config.kl_stop * config.target_kl
            if not stops and not math.isfinite(measured["loss"]):
                stats.skipped_minibatches += 1
                continue
            if stops:
                stats.add(measured)
                stats.stopped_early = True
                return finish(stats, rollout)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            norm = float(nn.utils.clip_grad_norm_(parameters, config.max_grad_norm))
            if not math.isfinite(norm):
                stats.skipped_minibatches += 1
                continue
            optimizer.step()
            stats.add(measured)  # of those that count alone, or their means would be too large
            stats.minibatches += 1
            stats.gradient_norm += norm
            stats.clipped_gradients += norm > config.max_grad_norm
    return finish(stats, rollout)


MEASURED = ("loss", "approx_kl", "clip_fraction", "policy_loss", "value_loss", "entropy", "ratio_max", "ratio_min")


def loss_of(
    now: Evaluated, part: Mapping[str, Tensor], config: PPOConfig, entropy_coefficient: float
) -> tuple[Tensor, dict[str, float]]:
    """The loss of one minibatch, and what is measured on it, ``MEASURED``, transferred at once.

    With ρ = p_now(a) / p_then(a): L = −min(ρA, clip(ρ, 1−ε, 1+ε)A) + c_v (V − target)² / 2 − c_e H.
    """
    valid, acting = part["valid"], part["valid"] & part["free"]
    log_ratio = now.log_prob - part["log_prob"]
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - config.clip, 1 + config.clip)
    policy_loss = -mean_over(torch.minimum(ratio * part["advantage"], clipped * part["advantage"]), acting)
    error = (now.value - part["target"]) ** 2
    if config.value_clip is not None:
        near = part["value"] + (now.value - part["value"]).clamp(-config.value_clip, config.value_clip)
        error = torch.maximum(error, (near - part["target"]) ** 2)
    value_loss = 0.5 * mean_over(error, valid)
    entropy = mean_over(now.entropies.sum(dim=-1), acting)
    loss = policy_loss + config.value_coefficient * value_loss - entropy_coefficient * entropy
    with torch.no_grad():
        # k3: an unbiased, non-negative estimate of KL(then ‖ now) (Schulman 2020)
        kl = mean_over(ratio - 1 - log_ratio, acting)
        clip_fraction = mean_over(((ratio - 1).abs() > config.clip).float(), acting)
        taken = torch.where(acting, ratio, 1.0)
        numbers = (loss, kl, clip_fraction, policy_loss, value_loss, entropy, taken.max(), taken.min())
        measured = torch.stack([number.detach() for number in numbers]).tolist()
    return loss, dict(zip(MEASURED, measured, strict=True))


def finish(stats: UpdateStats, rollout: Mapping[str, Tensor]) -> UpdateStats:
    """Sums to means; how much of the targets' variance the values explained before the update."""
    done, measured = max(stats.minibatches, 1), stats.minibatches + stats.stopped_early
    for name in ("policy_loss", "value_loss", "entropy", "clip_fraction"):
        setattr(stats, name, getattr(stats, name) / measured if measured else math.nan)  # NaN: all were left out
    stats.gradient_norm /= done
    stats.clipped_gradients /= done
    stats.gradient_health = gradient_health(stats.gradient_norm)
    valid = rollout["valid"]
    target, value = rollout["target"][valid], rollout["value"][valid]
    left, spread, around = (float(x.var(unbiased=False)) for x in (target - value, target, value))
    stats.explained_variance = 1 - left / spread if spread > 0 else 0.0
    stats.value_std, stats.target_std = around**0.5, spread**0.5
    return stats


def gradient_health(norm: float) -> float:
    """1 for norms in [0.01, 100], falling linearly in log10 to 0 over two decades on either side."""
    if not math.isfinite(norm) or norm <= 0:
        return 0.0
    decades = math.log10(norm)
    outside = max(-2 - decades, decades - 2, 0.0)
    return max(0.0, 1 - outside / 2)


def standardize(values: Tensor, where: Tensor) -> Tensor:
    """Zero mean and unit variance over the marked entries."""
    chosen = values[where]
    if len(chosen) < 2:
        return values
    return (values - chosen.mean()) / (chosen.std() + 1e-8)


def mean_over(values: Tensor, where: Tensor) -> Tensor:
    """Mean over the marked entries; 0 where there is none."""
    return (values * where).sum() / where.sum().clamp(min=1)
