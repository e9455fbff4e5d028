"""The worth of each (slot, blueprint), estimated from what the hosts of a run have shown.

Worths w [S·B] are in pp: what a seed that is kept adds to the final accuracy of its host. They have a normal prior,

    w ~ N(0, s² K),  K = a + b [same blueprint] + c [same slot] + d [same both],  a + b + c + d = 1,

so what one slot shows of a blueprint also says something about the others. Four kinds of measurements depend on them:

    gain in accuracy of an episode     y = o_a +     Σ w over its fossils + ε_a    (ε_a, ε_l) ~ N(0, Σ_g)
    gain by its loss                   y = o_l + λ_l Σ w over its fossils + ε_l    o_a, o_l ~ N(0, baseline_error²)
    trial of a seed                    y = α_t + λ_t w + ε                         ε ~ N(0, σ_t²)
    contribution                       y = α_c + λ_c w + ε                         ε ~ N(0, σ_c²)

Gains are over the no-growth baseline, whose own errors are the offsets o; one below −``max_loss`` counts as
−``max_loss``. The loss, in the pp that it was worth to hosts left alone, tells plans apart with fewer episodes: it is
less noisy than the number of samples that are right. What it is worth for seeds, λ_l, is unknown, and so is how its
errors are correlated with those of the accuracy (Σ_g). A trial or contribution is the last one of a seed, a
contribution while its alpha stood still; it measures how much a host leans on the seed, so its scale λ and its noise
are unknown, and so is an offset α for each slot: hosts lean on early seeds by 60 pp and on late ones by 2, whatever
they gain.

Given the scales λ, the noises and o_l, the posterior of θ = (o_a, α_t, α_c, w) is normal (Bayesian linear regression,
Bishop 2006, 3.3). Given the posterior, all others have closed forms, so both are found in turn (expectation
maximisation, with weak priors on every unknown). A kind that predicts nothing gets λ ≈ 0 or a large noise, and then
counts for nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from esper.config import ExperienceConfig
from esper.core.slots import Floats, Ints

ITERATIONS = 12
MAX_CORRELATION = 0.95
"""Correlation of the errors of an episode's two gains above which they count as one measurement."""
MAX_STRETCH = 2.0
"""Max factor by which the unit of worths is corrected in one iteration."""


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
    """Standard deviation of an episode's gain in accuracy given its fossils, the root of Σ_g's first entry."""

    def draw(self, z: Floats) -> Floats:
        """Returns a draw from the posterior, [S, B], for standard normal ``z`` [S·B]."""
        deviation = (self.root @ z).reshape(self.mean.shape)
        return np.asarray(self.mean + deviation)


class Experience:
    """Sums over all measurements of a run, and the worths that follow from them.

    Args:
        slots: names of the slots, S of them.
        blueprints: names of the blueprints, B of them.
        config: the prior.
    """

    SUMS = ("gains", "gram", "moments", "kept", "counts", "sums", "squares")

    def __init__(
        self,
        slots: tuple[str, ...],
        blueprints: tuple[str, ...],
        config: ExperienceConfig,
    ) -> None:
        self.slots = slots
        self.blueprints = blueprints
        self.config = config
        size = len(slots) * len(blueprints)
        correlations = prior_correlations(len(slots), len(blueprints), config)
        self._prior = np.linalg.inv(correlations)
        """The inverse of K."""
        # θ has o_a, then α_t and α_c of each slot, then w.
        seed = np.arange(size)
        slot = seed // len(blueprints)
        self._offsets = np.stack((1 + slot, 1 + len(slots) + slot))
        """Places in θ of the offsets of each seed's trial and contribution, [2, S·B]."""
        self._w = 1 + 2 * len(slots) + seed
        """Places of w, [S·B]."""
        self.gains = np.zeros((2, 2))
        """Σ y yᵀ over episodes, with y = (gain in accuracy, gain by the loss)."""
        self.gram = np.zeros((1 + size, 1 + size))
        """Σ x xᵀ over episodes, with x = (1, what was kept)."""
        self.moments = np.zeros((2, 1 + size))
        """Σ y xᵀ over episodes."""
        self.kept = np.zeros(size)
        """Number of episodes in which each (slot, blueprint) was kept."""
        self.counts = np.zeros((2, size))
        """Number of the trials and of the contributions y, [2, S·B]."""
        self.sums = np.zeros((2, size))
        """Σ y of them."""
        self.squares = np.zeros((2, size))
        """Σ y² of them."""
        self._worths: Worths | None = None

    @property
    def episodes(self) -> int:
        """Number of episodes whose gain is known."""
        return int(self.gram[0, 0])

    def add(
        self,
        gains: Floats,
        kept: Floats,
        trials: Floats,
        contributions: Floats,
    ) -> None:
        """Adds N episodes.

        Args:
            gains: of the committed network at the end over the no-growth baseline, by accuracy and by loss, pp [N, 2];
                NaN if they say nothing.
            kept: number of seeds that were fossilized, merged ones included, [N, S, B].
            trials: the last trial of each seed, pp [N, S, B]; NaN without a trial.
            contributions: the last contribution, likewise.
        """
        for kind, values in enumerate((trials, contributions)):
            rows = values.reshape(len(gains), len(self.kept))
            measured = np.isfinite(rows)
            self.counts[kind] += measured.sum(axis=0)
            self.sums[kind] += np.where(measured, rows, 0.0).sum(axis=0)
            self.squares[kind] += np.where(measured, rows**2, 0.0).sum(axis=0)

        known = np.isfinite(gains).all(axis=1)
        # A diverged host must not outweigh all others.
        gains = np.maximum(gains[known], -self.config.max_loss)
        x = np.ones((len(gains), len(self.gram)))
        x[:, 1:] = kept[known].reshape(len(gains), len(self.kept))
        self.gains += gains.T @ gains
        self.gram += x.T @ x
        self.moments += gains.T @ x
        self.kept += x[:, 1:].sum(axis=0)
        self._worths = None

    @property
    def worths(self) -> Worths:
        """The posterior given everything added so far."""
        if self._worths is None:
            if self.counts.any() or self.gram.any():
                self._worths = self._posterior()
            else:
                self._worths = without_measurements(self.slots, self.blueprints, self.config)
        return self._worths

    def _posterior(self) -> Worths:
        """Alternates between the posterior of θ and the unknown scales; at first, gains alone count."""
        config = self.config
        strength = config.strength
        guess = config.noise**2
        w = self._w
        # The unknowns besides θ: s², Σ_g, o_l and λ_l, λ_t and λ_c, σ_t² and σ_c².
        scale = config.worth_std**2
        noise = guess * np.eye(2)
        loss_offset = 0.0
        loss_slope = 0.0
        slopes = np.zeros(2)
        errors = np.full(2, guess)
        for _ in range(ITERATIONS):
            gains, moments = without_offset(self.gains, self.moments, self.gram[0], loss_offset)
            rows = gain_rows(w, loss_slope)
            mean, covariance = self._solve(scale, rows, moments, noise, slopes, errors)
            second = covariance + np.outer(mean, mean)  # E[θ θᵀ]

            fitted = (rows @ mean) @ moments.T  # [2, 2]
            squares = np.einsum("iap,pq,jbq,ab->ij", rows, second, rows, self.gram, optimize=True)
            missed = gains - fitted - fitted.T + squares  # E[Σ ε εᵀ]
            noise = (strength * guess * np.eye(2) + missed) / (strength + self.episodes)

            drawn = (self._prior * second[np.ix_(w, w)]).sum()
            scale = (strength * config.worth_std**2 + drawn) / (strength + len(w))
            for kind in range(2):
                slope, error = self._line(kind, mean, second, errors[kind])
                slopes[kind] = slope
                errors[kind] = error

            # Worths whose unit has drifted to that of the loss are stretched back to pp of accuracy (parameter-expanded
            # EM, Liu et al. 1998): without that, a precise loss keeps the slope that it has.
            loss_offset, loss_slope, stretch = self._gain_lines(mean, second, np.diag(noise))
            scale = scale * stretch**2
            slopes = slopes / stretch
        posterior = covariance[np.ix_(w, w)]
        symmetric = (posterior + posterior.T) / 2
        shape = (len(self.slots), len(self.blueprints))
        return Worths(
            mean=mean[w].reshape(shape),
            error=np.sqrt(np.diag(posterior)).reshape(shape),
            root=np.asarray(np.linalg.cholesky(symmetric), dtype=np.float64),
            scale=float(np.sqrt(scale)),
            noise=float(np.sqrt(noise[0, 0])),
        )

    def _solve(
        self,
        scale: float,
        rows: Floats,
        moments: Floats,
        noise: Floats,
        slopes: Floats,
        errors: Floats,
    ) -> tuple[Floats, Floats]:
        """Returns mean and covariance of θ.

        Args:
            scale: s².
            rows: :func:`gain_rows`.
            moments: Σ y xᵀ over episodes, [2, 1 + S·B].
            noise: Σ_g.
            slopes: λ_t and λ_c.
            errors: σ_t² and σ_c².
        """
        w = self._w
        # The precision of the prior; each measurement adds x xᵀ / σ².
        size = w[-1] + 1
        precision = np.diag(np.full(size, self.config.offset_std**-2))
        precision[0, 0] = self.config.baseline_error**-2
        precision[np.ix_(w, w)] = self._prior / scale

        x = np.concatenate(rows)
        inverse = gain_precision(noise)
        precision += x.T @ np.kron(inverse, self.gram) @ x
        right = x.T @ (inverse @ moments).ravel()
        for kind in range(2):
            x = leaning_rows(self._offsets[kind], w, slopes[kind])
            precision += (x.T * self.counts[kind]) @ x / errors[kind]
            right += x.T @ self.sums[kind] / errors[kind]

        covariance = np.linalg.inv(precision)
        return covariance @ right, covariance

    def _gain_lines(
        self,
        mean: Floats,
        second: Floats,
        variances: Floats,
    ) -> tuple[float, float, float]:
        """Returns o_l, λ_l, and the factor by which the unit of worths is too small.

        With f = Σ w over an episode's fossils, gains by the loss are regressed on (1, f), with the priors of o_l and
        λ_l, and gains in accuracy less o_a on f, with that of λ_l; ``variances`` [2] are those of the gains.
        """
        w = self._w
        kept = self.gram[0, 1:]
        total = kept @ mean[w]  # E[Σ f]
        together = self.gram[1:, 1:]  # how often two were kept together
        squares = (together * second[np.ix_(w, w)]).sum()  # E[Σ f²]
        products = self.moments[:, 1:] @ mean[w]  # E[Σ f y], [2]
        weights = variances / self.config.loss_slope_std**2

        # E[Σ f (y − o_a)] / E[Σ f²], drawn to 1 by the prior.
        product = products[0] - kept @ second[w, 0]
        stretch = (product + weights[0]) / (squares + weights[0])
        stretch = float(np.clip(stretch, 1 / MAX_STRETCH, MAX_STRETCH))

        least = self.episodes + variances[1] / self.config.baseline_error**2
        normal = [
            [least, total],
            [total, squares + weights[1]],
        ]
        right = [
            self.moments[1, 0],
            products[1] + self.config.loss_slope * weights[1],
        ]
        offset, slope = np.linalg.solve(normal, right)
        return offset, slope / stretch, stretch

    def _line(
        self,
        kind: int,
        mean: Floats,
        second: Floats,
        error: float,
    ) -> tuple[float, float]:
        """Returns λ and σ² of trials (0) or contributions (1), given E[θ], E[θ θᵀ] and the last σ²."""
        w = self._w
        config = self.config
        offsets = self._offsets[kind]
        n = self.counts[kind]
        y = self.sums[kind]
        precision = n @ second[w, w] / error + config.slope_std**-2
        right = (y @ mean[w] - n @ second[offsets, w]) / error
        right += config.slope / config.slope_std**2
        slope = right / precision

        x = leaning_rows(offsets, w, slope)
        fitted = x @ mean
        second_fitted = (x @ second * x).sum(axis=1)  # E[(x θ)²]
        missed = self.squares[kind].sum() - 2 * y @ fitted + n @ second_fitted  # E[Σ ε²]
        variance = (config.strength * config.noise**2 + missed) / (config.strength + n.sum())
        return slope, variance

    def table(self) -> dict[str, dict[str, tuple[float, float, int]]]:
        """Returns mean and error of each worth (pp), and how often such a seed was kept, by slot and blueprint."""
        mean = self.worths.mean
        error = self.worths.error
        kept = self.kept.reshape(mean.shape)
        table: dict[str, dict[str, tuple[float, float, int]]] = {}
        for s, slot in enumerate(self.slots):
            table[slot] = {}
            for b, blueprint in enumerate(self.blueprints):
                table[slot][blueprint] = (
                    float(mean[s, b]),
                    float(error[s, b]),
                    int(kept[s, b]),
                )
        return table

    def clear(self) -> None:
        """Forgets all measurements."""
        for name in self.SUMS:
            getattr(self, name)[:] = 0.0
        self._worths = None

    def state_dict(self) -> dict[str, Any]:
        """Returns the sums, with the names that they belong to."""
        sums = {name: torch.from_numpy(getattr(self, name).copy()) for name in self.SUMS}
        return {
            "slots": list(self.slots),
            "blueprints": list(self.blueprints),
            **sums,
        }

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
            if values.shape != getattr(self, name).shape or not np.isfinite(values).all():
                raise ValueError(f"{name} of the experience has a wrong shape or non-finite values")
        impossible = sums["counts"].min() < 0
        for name in ("gram", "gains"):  # sums of squares, so their eigenvalues are not negative
            spectrum = np.linalg.eigvalsh(sums[name])
            impossible |= spectrum.min() < -1e-9 * max(1.0, spectrum.max())
        if impossible:
            raise ValueError("the experience has sums that no measurements can have")
        for name, values in sums.items():
            getattr(self, name)[:] = values
        self._worths = self._posterior()  # fails now for sums that belong to no measurements

    def fits(self, state: Mapping[str, Any]) -> bool:
        """Whether a saved experience is of the same slots and blueprints."""
        slots = tuple(state["slots"])
        blueprints = tuple(state["blueprints"])
        return slots == self.slots and blueprints == self.blueprints


@lru_cache
def without_measurements(
    slots: tuple[str, ...],
    blueprints: tuple[str, ...],
    config: ExperienceConfig,
) -> Worths:
    """Returns the worths before any measurement, which many simulated worlds begin with."""
    return Experience(slots, blueprints, config)._posterior()


def without_offset(
    gains: Floats,
    moments: Floats,
    counts: Floats,
    loss_offset: float,
) -> tuple[Floats, Floats]:
    """Returns Σ y yᵀ [2, 2] and Σ y xᵀ [2, 1 + S·B] of gains less the offset of those by the loss.

    ``counts`` are Σ x, [1 + S·B].
    """
    o = np.array([0.0, loss_offset])
    sums = moments[:, 0]
    # Σ (y − o) (y − o)ᵀ and Σ (y − o) xᵀ, multiplied out.
    cross = np.outer(o, sums)
    squares = gains - cross - cross.T + counts[0] * np.outer(o, o)
    return squares, moments - np.outer(o, counts)


def gain_precision(noise: Floats) -> Floats:
    """Returns the inverse [2, 2] of Σ_g; if both errors are nearly the same, that of two gains that count as one.

    On simulated hosts the loss follows from the accuracy, and their difference has no noise. If the slope λ_l were off
    by 1 %, that difference would say that no seed is worth anything, the more surely, the more episodes there are.
    """
    variances = np.diag(noise)
    correlation = abs(noise[0, 1]) / np.sqrt(variances.prod())
    if correlation > MAX_CORRELATION:
        return np.diag(1 / (variances * (1 + correlation)))
    return np.asarray(np.linalg.inv(noise), dtype=np.float64)


def gain_rows(w: Ints, loss_slope: float) -> Floats:
    """Returns x [2, 1 + S·B, D]: the maps from θ to (o_a, w) and to (0, λ_l w). ``w`` [S·B] are the places in θ."""
    seed = np.arange(len(w))
    size = w[-1] + 1
    x = np.zeros((2, 1 + len(w), size))
    x[0, 0, 0] = 1.0
    x[0, 1 + seed, w] = 1.0
    x[1, 1 + seed, w] = loss_slope
    return x


def leaning_rows(offsets: Ints, w: Ints, slope: float) -> Floats:
    """Returns x [S·B, D] with E[y | θ] = x θ for a trial or contribution y of each seed, given the places in θ of their
    offsets and of w, [S·B] each."""
    seed = np.arange(len(w))
    x = np.zeros((len(w), w[-1] + 1))
    x[seed, offsets] = 1.0
    x[seed, w] = slope
    return x


def prior_correlations(slots: int, blueprints: int, config: ExperienceConfig) -> Floats:
    """Returns K, [S·B, S·B]."""
    slot, blueprint = np.divmod(np.arange(slots * blueprints), blueprints)
    same_slot = slot[:, None] == slot
    same_blueprint = blueprint[:, None] == blueprint
    by_both = 1 - config.shared - config.by_blueprint - config.by_slot
    correlations: Floats = (
        config.shared
        + config.by_blueprint * same_blueprint
        + config.by_slot * same_slot
        + by_both * (same_slot & same_blueprint)
    )
    return correlations
