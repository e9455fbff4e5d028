"""The worth of each (slot, blueprint), estimated from what the hosts of a run have shown.

Worths w [S·B] are in pp: what a seed that is kept adds to the final accuracy of its host. They have a normal prior,

    w ~ N(0, s² K),  K = a + b [same blueprint] + c [same slot] + d [same both],  a + b + c + d = 1,

so what one slot shows of a blueprint also says something about the others. Three kinds of measurements depend on them:

    gain of an episode     y = o + Σ w over its fossils + ε    ε ~ N(0, σ_g²),  o ~ N(0, (s/3)²)
    trial of a seed        y = α_t + λ_t w + ε                 ε ~ N(0, σ_t²)
    contribution           y = α_c + λ_c w + ε                 ε ~ N(0, σ_c²)

The gain is accuracy over the no-growth baseline, whose own error is the offset o; a loss counts as at most
``max_loss``. A trial or contribution is the last one of a seed, a contribution while its alpha stood still; it measures
how much a host leans on the seed, so its scale λ, its offset α and its noise are unknown. Given these, the posterior of
w is normal (Bayesian linear regression, Bishop 2006, 3.3). Given the posterior, they have closed forms, so both are
found in turn (expectation maximisation, with weak priors on every unknown). A kind that predicts nothing gets λ ≈ 0 or
a large σ, and then counts for nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from esper.config import ExperienceConfig

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

ITERATIONS = 12
OFFSET_SHARE = 1 / 3
"""Prior standard deviation of o in units of s."""
SLOPE, SLOPE_STD = 0.5, 0.5
"""Prior of λ: mean and standard deviation. That of α is N(0, (5 s)²)."""


@dataclass(frozen=True)
class Worths:
    """The posterior, in pp; [S, B] unless noted."""

    mean: Floats
    error: Floats
    """Posterior standard deviations."""
    root: Floats
    """L [S·B, S·B] with L Lᵀ = posterior covariance; draws are mean + L z for standard normal z."""
    scale: float
    """s, the prior standard deviation of a worth as estimated."""
    noise: float
    """σ_g, the standard deviation of an episode's gain given its fossils."""

    def draw(self, z: Floats) -> Floats:
        """Returns a draw from the posterior, [S, B], for standard normal ``z`` [S·B]."""
        return np.asarray(self.mean + (self.root @ z).reshape(self.mean.shape))


class Experience:
    """Sums over all measurements of a run, and the worths that follow from them.

    Args:
        slots: names of the slots, S of them.
        blueprints: names of the blueprints, B of them.
        config: the prior.
    """

    SUMS = ("gains", "gram", "moment", "kept", "counts", "sums", "squares")

    def __init__(self, slots: tuple[str, ...], blueprints: tuple[str, ...], config: ExperienceConfig) -> None:
        self.slots, self.blueprints, self.config = slots, blueprints, config
        size = len(slots) * len(blueprints)
        self._prior = np.linalg.inv(prior_correlations(len(slots), len(blueprints), config))
        self.gains = np.zeros(2)
        """Number of episodes, and the sum of their squared gains."""
        self.gram, self.moment = np.zeros((1 + size, 1 + size)), np.zeros(1 + size)
        """Σ x xᵀ and Σ x y over episodes, with x = (1, what was kept)."""
        self.kept = np.zeros(size)
        """Number of episodes in which each (slot, blueprint) was kept."""
        self.counts, self.sums, self.squares = (np.zeros((2, size)) for _ in range(3))
        """Number, Σ y and Σ y² of the trials and of the contributions, [2, S·B]."""
        self._worths: Worths | None = None

    @property
    def episodes(self) -> int:
        return int(self.gains[0])

    def add(self, gains: Floats, kept: Bools, trials: Floats, contributions: Floats) -> None:
        """Adds N episodes.

        Args:
            gains: final committed accuracy minus the no-growth baseline's, pp [N]; NaN if it says nothing.
            kept: what was fossilized, [N, S, B].
            trials: the last trial of each seed, pp [N, S, B]; NaN if there is none.
            contributions: the last contribution, likewise.
        """
        for i, values in enumerate((trials, contributions)):
            rows = values.reshape(len(gains), len(self.kept))
            self.counts[i] += np.isfinite(rows).sum(axis=0)
            self.sums[i] += np.where(np.isfinite(rows), rows, 0.0).sum(axis=0)
            self.squares[i] += np.where(np.isfinite(rows), rows**2, 0.0).sum(axis=0)
        known = np.isfinite(gains)
        gains = np.maximum(gains[known], -self.config.max_loss)
        x = np.ones((len(gains), len(self.moment)))
        x[:, 1:] = kept[known].reshape(len(gains), len(self.kept))
        self.gains += np.array([len(gains), (gains**2).sum()])
        self.gram += x.T @ x
        self.moment += x.T @ gains
        self.kept += x[:, 1:].sum(axis=0)
        self._worths = None

    @property
    def worths(self) -> Worths:
        """The posterior given everything added so far."""
        if self._worths is None:
            self._worths = self._posterior()
        return self._worths

    def _posterior(self) -> Worths:
        """Alternates between the posterior of (o, w) and the unknown scales, starting from their priors."""
        config, size = self.config, len(self.kept)
        strength, prior_scale, prior_noise = config.strength, config.worth_std**2, config.noise**2
        scale, noise = prior_scale, prior_noise
        slopes, offsets, errors = np.full(2, SLOPE), np.zeros(2), np.full(2, prior_noise)
        precision = np.zeros((1 + size, 1 + size))
        for _ in range(ITERATIONS):
            precision[:] = self.gram / noise
            precision[0, 0] += 1 / (OFFSET_SHARE**2 * scale)
            precision[1:, 1:] += self._prior / scale
            right = self.moment / noise
            for i in range(2):
                precision[1:, 1:] += np.diag(slopes[i] ** 2 / errors[i] * self.counts[i])
                right[1:] += slopes[i] / errors[i] * (self.sums[i] - offsets[i] * self.counts[i])
            covariance = np.linalg.inv(precision)
            mean = covariance @ right
            second = covariance + np.outer(mean, mean)  # E[θ θᵀ]
            residual = self.gains[1] - 2 * mean @ self.moment + (self.gram * second).sum()
            noise = (strength * prior_noise + residual) / (strength + self.gains[0])
            drawn = (self._prior * second[1:, 1:]).sum() + second[0, 0] / OFFSET_SHARE**2
            scale = (strength * prior_scale + drawn) / (strength + size + 1)
            for i in range(2):
                slopes[i], offsets[i], errors[i] = self._line(i, mean[1:], np.diag(second)[1:], errors[i])
        posterior, shape = covariance[1:, 1:], (len(self.slots), len(self.blueprints))
        return Worths(
            mean=mean[1:].reshape(shape),
            error=np.sqrt(np.diag(posterior)).reshape(shape),
            root=np.asarray(np.linalg.cholesky((posterior + posterior.T) / 2), dtype=np.float64),
            scale=float(np.sqrt(scale)),
            noise=float(np.sqrt(noise)),
        )

    def _line(self, i: int, mean: Floats, square: Floats, error: float) -> tuple[float, float, float]:
        """Fits y = α + λ w to trials (0) or contributions (1); returns λ, α and σ².

        ``mean`` and ``square`` [S·B] are E[w] and E[w²]; ``error`` is the last σ².
        """
        n, y, prior_noise = self.counts[i], self.sums[i], self.config.noise**2
        normal = np.array([[n.sum(), n @ mean], [n @ mean, n @ square]]) / error
        normal += np.diag((1 / self.config.worth_std**2 / 25, 1 / SLOPE_STD**2))
        offset, slope = np.linalg.solve(normal, np.array([y.sum() / error, mean @ y / error + SLOPE / SLOPE_STD**2]))
        residual = (
            self.squares[i].sum()
            - 2 * (offset * y.sum() + slope * mean @ y)
            + n @ (offset**2 + 2 * offset * slope * mean + slope**2 * square)
        )
        strength = self.config.strength
        return slope, offset, (strength * prior_noise + residual) / (strength + n.sum())

    def table(self) -> dict[str, dict[str, tuple[float, float, int]]]:
        """Returns mean and error of each worth (pp), and how often such a seed was kept, by slot and blueprint."""
        mean, error, kept = self.worths.mean, self.worths.error, self.kept.reshape(self.worths.mean.shape)
        return {
            slot: {
                name: (float(mean[s, b]), float(error[s, b]), int(kept[s, b])) for b, name in enumerate(self.blueprints)
            }
            for s, slot in enumerate(self.slots)
        }

    def clear(self) -> None:
        for name in self.SUMS:
            getattr(self, name)[:] = 0.0
        self._worths = None

    def state_dict(self) -> dict[str, Any]:
        """Returns the sums, with the names that they belong to."""
        sums = {name: torch.from_numpy(getattr(self, name).copy()) for name in self.SUMS}
        return {"slots": list(self.slots), "blueprints": list(self.blueprints), **sums}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores :meth:`state_dict`. Raises ValueError if it belongs to other slots or blueprints."""
        if not self.fits(state):
            raise ValueError(
                f"the experience is of slots {', '.join(state['slots'])} and blueprints "
                f"{', '.join(state['blueprints'])}; this host has {', '.join(self.slots)} and "
                f"{', '.join(self.blueprints)}"
            )
        sums = {name: state[name].numpy() for name in self.SUMS}
        for name, values in sums.items():
            own = getattr(self, name)
            if values.shape != own.shape or not np.isfinite(values).all():
                raise ValueError(f"{name} of the experience has a wrong shape or non-finite values")
        if np.linalg.eigvalsh(sums["gram"]).min() < -1e-6 or min(sums["counts"].min(), sums["gains"].min()) < 0:
            raise ValueError("the experience has sums that no measurements can have")
        for name, values in sums.items():
            getattr(self, name)[:] = values
        self._worths = self._posterior()  # fails now for sums that belong to no measurements

    def fits(self, state: Mapping[str, Any]) -> bool:
        """Whether a saved experience is of the same slots and blueprints."""
        return (tuple(state["slots"]), tuple(state["blueprints"])) == (self.slots, self.blueprints)


def prior_correlations(slots: int, blueprints: int, config: ExperienceConfig) -> Floats:
    """Returns K, [S·B, S·B]."""
    slot, blueprint = np.divmod(np.arange(slots * blueprints), blueprints)
    same_slot, same_blueprint = slot[:, None] == slot, blueprint[:, None] == blueprint
    shared, by_blueprint, by_slot = config.shared, config.by_blueprint, config.by_slot
    own = 1 - shared - by_blueprint - by_slot
    correlations: Floats = (
        shared + by_blueprint * same_blueprint + by_slot * same_slot + own * (same_slot & same_blueprint)
    )
    return correlations
