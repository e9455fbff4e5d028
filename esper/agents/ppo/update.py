"""The clipped PPO update (Schulman et al. 2017): epochs over minibatches of whole sequences, with a KL stop."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from esper.config import PPOConfig

LEARNED_FROM = ("log_prob", "value", "advantage", "target", "valid", "free")
"""The parts of a rollout that an update reads."""


@dataclass(frozen=True)
class PolicyOutput:
    """The current policy on part of the rollout: values and joint log-probabilities [T, E], entropies [T, E, heads]."""

    value: Tensor
    log_prob: Tensor
    entropies: Tensor


Measured = dict[str, float]
Loss = Callable[[PolicyOutput, Mapping[str, Tensor], PPOConfig, float], tuple[Tensor, Measured]]
"""Maps the present policy on a minibatch, the minibatch, the config and the weight of the entropy bonus to a loss and
its ``MEASURED`` numbers."""


@dataclass
class UpdateStats:
    """Statistics of one update, under the names that dashboards use."""

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
        """Adds one minibatch; :func:`reduce` turns the sums into means."""
        self.policy_loss += measured["policy_loss"]
        self.value_loss += measured["value_loss"]
        self.entropy += measured["entropy"]
        self.clip_fraction += measured["clip_fraction"]
        self.approx_kl = measured["approx_kl"]
        self.ratio_max = max(self.ratio_max, measured["ratio_max"])
        self.ratio_min = min(self.ratio_min, measured["ratio_min"])

    @classmethod
    def skipped(
        cls,
        broken_steps: int,
        learning_rate: float,
        entropy_coefficient: float,
    ) -> UpdateStats:
        """Returns the statistics of a skipped update: everything it would have measured is NaN."""
        return cls(
            policy_loss=math.nan,
            value_loss=math.nan,
            entropy=math.nan,
            approx_kl=math.nan,
            clip_fraction=math.nan,
            explained_variance=math.nan,
            gradient_norm=math.nan,
            learning_rate=learning_rate,
            entropy_coefficient=entropy_coefficient,
            broken_steps=broken_steps,
        )


def update_policy(
    parameters: list[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    evaluate: Callable[[Tensor], PolicyOutput],
    rollout: Mapping[str, Tensor],
    config: PPOConfig,
    entropy_coefficient: float,
    generator: torch.Generator,
    loss_of: Loss,
) -> UpdateStats:
    """Improves the policy on one rollout.

    An env's whole sequence stays in one minibatch. A minibatch with a non-finite loss or gradient is skipped and
    counted; it does not change the weights.

    Args:
        parameters: the weights whose gradient is clipped.
        optimizer: holds ``parameters``.
        evaluate: runs the current policy on the sequences of the envs with the given indices.
        rollout: ``log_prob``, ``value``, ``advantage``, ``target`` [T, E]; ``valid`` bool [T, E], the steps that count;
            ``free`` bool [T, E], the steps with more than one legal op. Other steps have no actor loss.
        config: the update's constants.
        entropy_coefficient: weight of the entropy bonus.
        generator: shuffles the minibatches.
        loss_of: :func:`ppo_loss`, or :func:`imitation_loss` if the actions are a teacher's.
    """
    stats = UpdateStats(entropy_coefficient=entropy_coefficient, learning_rate=optimizer.param_groups[0]["lr"])
    learned_from = {name: rollout[name] for name in LEARNED_FROM}
    learned_from["advantage"] = standardize(rollout["advantage"], rollout["valid"] & rollout["free"])
    envs = rollout["advantage"].shape[1]
    n_minibatches = min(config.n_minibatches, envs)
    for _ in range(config.update_epochs):
        order = torch.randperm(envs, generator=generator)
        for chosen in order.tensor_split(n_minibatches):
            part = {name: values[:, chosen] for name, values in learned_from.items()}
            loss, measured = loss_of(evaluate(chosen), part, config, entropy_coefficient)
            if measured["approx_kl"] > config.kl_stop * config.target_kl:
                stats.add(measured)
                stats.stopped_early = True
                return reduce(stats, rollout, config.healthy_gradients)
            if not math.isfinite(measured["loss"]):
                stats.skipped_minibatches += 1
                continue
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            norm = float(nn.utils.clip_grad_norm_(parameters, config.max_grad_norm))
            if not math.isfinite(norm):
                stats.skipped_minibatches += 1
                continue
            optimizer.step()
            stats.add(measured)  # only minibatches that count, or the means would be too large
            stats.minibatches += 1
            stats.gradient_norm += norm
            stats.clipped_gradients += norm > config.max_grad_norm
    return reduce(stats, rollout, config.healthy_gradients)


MEASURED = ("loss", "approx_kl", "clip_fraction", "policy_loss", "value_loss", "entropy", "ratio_max", "ratio_min")


def ppo_loss(
    now: PolicyOutput,
    part: Mapping[str, Tensor],
    config: PPOConfig,
    entropy_coefficient: float,
) -> tuple[Tensor, Measured]:
    """Returns the loss of one minibatch and its ``MEASURED`` numbers, which are transferred in one copy.

    With ρ = p_now(a) / p_then(a): L = −min(ρA, clip(ρ, 1−ε, 1+ε)A) + c_v (V − target)² / 2 − c_e H.
    """
    acting = part["valid"] & part["free"]
    advantage = part["advantage"]
    # Steps without a choice, or of envs that were idle, have no actor loss.
    log_ratio = now.log_prob - part["log_prob"]
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - config.clip, 1 + config.clip)
    gain = torch.minimum(ratio * advantage, clipped * advantage)
    policy_loss = -mean_over(gain, acting)

    error = (now.value - part["target"]) ** 2
    if config.value_clip is not None:
        change = (now.value - part["value"]).clamp(-config.value_clip, config.value_clip)
        near = part["value"] + change
        error = torch.maximum(error, (near - part["target"]) ** 2)
    value_loss = 0.5 * mean_over(error, part["valid"])

    entropy = mean_over(now.entropies.sum(dim=-1), acting)
    loss = policy_loss + config.value_coefficient * value_loss - entropy_coefficient * entropy
    with torch.no_grad():
        # k3: an unbiased, non-negative estimate of KL(then ‖ now) (Schulman 2020)
        kl = mean_over(ratio - 1 - log_ratio, acting)
        clip_fraction = mean_over(((ratio - 1).abs() > config.clip).float(), acting)
        taken = torch.where(acting, ratio, 1.0)
        numbers = (
            loss,
            kl,
            clip_fraction,
            policy_loss,
            value_loss,
            entropy,
            taken.max(),
            taken.min(),
        )
        measured = torch.stack([number.detach() for number in numbers]).tolist()
    return loss, dict(zip(MEASURED, measured, strict=True))


def imitation_loss(
    now: PolicyOutput,
    part: Mapping[str, Tensor],
    config: PPOConfig,
    entropy_coefficient: float,
) -> tuple[Tensor, Measured]:
    """Returns the loss of acting like the rollout, and its ``MEASURED`` numbers; there is no entropy bonus.

    L = −ln p_now(a) + c_v (V − target)² / 2. The policy that acted was a teacher's, so there are no ratios to it.
    """
    acting = part["valid"] & part["free"]
    policy_loss = -mean_over(now.log_prob, acting)
    value_loss = 0.5 * mean_over((now.value - part["target"]) ** 2, part["valid"])
    loss = policy_loss + config.value_coefficient * value_loss
    with torch.no_grad():
        entropy = mean_over(now.entropies.sum(dim=-1), acting)
        numbers = (loss, policy_loss, value_loss, entropy)
        measured = torch.stack([number.detach() for number in numbers]).tolist()
    return loss, {
        "loss": measured[0],
        "approx_kl": 0.0,
        "clip_fraction": 0.0,
        "policy_loss": measured[1],
        "value_loss": measured[2],
        "entropy": measured[3],
        "ratio_max": 1.0,
        "ratio_min": 1.0,
    }


def reduce(
    stats: UpdateStats,
    rollout: Mapping[str, Tensor],
    healthy: tuple[float, float],
) -> UpdateStats:
    """Turns sums into means and adds the explained variance of the targets by the values before the update."""
    measured = stats.minibatches + stats.stopped_early or math.nan  # NaN: all were skipped
    stats.policy_loss /= measured
    stats.value_loss /= measured
    stats.entropy /= measured
    stats.clip_fraction /= measured
    learned = max(stats.minibatches, 1)
    stats.gradient_norm /= learned
    stats.clipped_gradients /= learned
    stats.gradient_health = gradient_health(stats.gradient_norm, healthy)

    valid = rollout["valid"]
    target = rollout["target"][valid]
    value = rollout["value"][valid]
    spread = _variance(target)
    # 1 − Var(target − V) / Var(target), with the values that acted.
    stats.explained_variance = 0.0
    if spread > 0:
        stats.explained_variance = 1 - _variance(target - value) / spread
    stats.value_std = _variance(value) ** 0.5
    stats.target_std = spread**0.5
    return stats


def _variance(values: Tensor) -> float:
    return float(values.var(unbiased=False))


def gradient_health(norm: float, healthy: tuple[float, float]) -> float:
    """Returns 1 for norms between those of ``healthy``, falling linearly in log10 to 0 two decades outside."""
    if not math.isfinite(norm) or norm <= 0:
        return 0.0
    lowest, highest = healthy
    below = math.log10(lowest) - math.log10(norm)
    above = math.log10(norm) - math.log10(highest)
    return max(0.0, 1 - max(below, above, 0.0) / 2)


def standardize(values: Tensor, where: Tensor) -> Tensor:
    """Scales values to zero mean and unit variance over the marked entries; fewer than two leave them unchanged."""
    chosen = values[where]
    if len(chosen) < 2:
        return values
    return (values - chosen.mean()) / (chosen.std() + 1e-8)


def mean_over(values: Tensor, where: Tensor) -> Tensor:
    """Returns the mean over the marked entries; 0 without any."""
    return (values * where).sum() / where.sum().clamp(min=1)
