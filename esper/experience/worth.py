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
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from esper.config import ExperienceConfig

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]

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
        return np.asarray(self.mean + (self.root @ z).reshape(self.mean.shape))


class Experience:
    """Sums over all measurements of a run, and the worths that follow from them.

    Args:
        slots: names of the slots, S of them.
        blueprints: names of the blueprints, B of them.
        config: the prior.
    """

    SUMS = ("gains", "gram", "moments", "kept", "counts", "sums", "squares")

    def __init__(self, slots: tuple[str, ...], blueprints: tuple[str, ...], config: ExperienceConfig) -> None:
        self.slots, self.blueprints, self.config = slots, blueprints, config
        size = len(slots) * len(blueprints)
        self._prior = np.linalg.inv(prior_correlations(len(slots), len(blueprints), config))
        seed, first = np.arange(size), 1 + 2 * len(slots)
        offsets = 1 + len(slots) * np.arange(2)[:, None] + seed // len(blueprints)
        self._places = offsets, first + seed
        """Places in θ of the offsets of each seed's trial and contribution [2, S·B], and of w [S·B]."""
        self.gains = np.zeros((2, 2))
        """Σ y yᵀ over episodes, with y = (gain in accuracy, gain by the loss)."""
        self.gram, self.moments = np.zeros((1 + size, 1 + size)), np.zeros((2, 1 + size))
        """Σ x xᵀ and Σ y xᵀ over episodes, with x = (1, what was kept)."""
        self.kept = np.zeros(size)
        """Number of episodes in which each (slot, blueprint) was kept."""
        self.counts, self.sums, self.squares = (np.zeros((2, size)) for _ in range(3))
        """Number, Σ y and Σ y² of the trials and of the contributions, [2, S·B]."""
        self._worths: Worths | None = None

    @property
    def episodes(self) -> int:
        return int(self.gram[0, 0])

    def add(self, gains: Floats, kept: Bools, trials: Floats, contributions: Floats) -> None:
        """Adds N episodes.

        Args:
            gains: of the committed network at the end over the no-growth baseline, by accuracy and by loss, pp [N, 2];
                NaN if they say nothing.
            kept: what was fossilized, [N, S, B].
            trials: the last trial of each seed, pp [N, S, B]; NaN if there is none.
            contributions: the last contribution, likewise.
        """
        for i, values in enumerate((trials, contributions)):
            rows = values.reshape(len(gains), len(self.kept))
            self.counts[i] += np.isfinite(rows).sum(axis=0)
            self.sums[i] += np.where(np.isfinite(rows), rows, 0.0).sum(axis=0)
            self.squares[i] += np.where(np.isfinite(rows), rows**2, 0.0).sum(axis=0)
        known = np.isfinite(gains).all(axis=1)
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
            self._worths = self._posterior()
        return self._worths

    def _posterior(self) -> Worths:
        """Alternates between the posterior of θ and the unknown scales; at first, gains alone count."""
        config, shape = self.config, (len(self.slots), len(self.blueprints))
        strength, guess = config.strength, config.noise**2
        scale, noise, line = config.worth_std**2, guess * np.eye(2), np.zeros(2)
        slopes, errors = np.zeros(2), np.full(2, guess)
        _, w = self._places
        for _ in range(ITERATIONS):
            gains, moments = without_offset(self.gains, self.moments, self.gram[0], line[0])
            rows = gain_rows(w, line[1])
            mean, covariance = self._solve(scale, rows, moments, noise, slopes, errors)
            second = covariance + np.outer(mean, mean)  # E[θ θᵀ]
            fitted = (rows @ mean) @ moments.T  # [2, 2]
            squares = np.einsum("iap,pq,jbq,ab->ij", rows, second, rows, self.gram, optimize=True)
            missed = gains - fitted - fitted.T + squares  # E[Σ ε εᵀ]
            noise = (strength * guess * np.eye(2) + missed) / (strength + self.episodes)
            drawn = (self._prior * second[np.ix_(w, w)]).sum()
            scale = (strength * config.worth_std**2 + drawn) / (strength + len(w))
            for i in range(2):
                slopes[i], errors[i] = self._line(i, mean, second, errors[i])
            # Worths whose unit has drifted to that of the loss are stretched back to pp of accuracy (parameter-expanded
            # EM, Liu et al. 1998): without that, a precise loss keeps the slope that it has.
            line, stretch = self._gain_lines(mean, second, np.diag(noise))
            scale, slopes = scale * stretch**2, slopes / stretch
        posterior = covariance[np.ix_(w, w)]
        return Worths(
            mean=mean[w].reshape(shape),
            error=np.sqrt(np.diag(posterior)).reshape(shape),
            root=np.asarray(np.linalg.cholesky((posterior + posterior.T) / 2), dtype=np.float64),
            scale=float(np.sqrt(scale)),
            noise=float(np.sqrt(noise[0, 0])),
        )

    def _solve(
        self, scale: float, rows: Floats, moments: Floats, noise: Floats, slopes: Floats, errors: Floats
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
        offsets, w = self._places
        precision = np.diag(np.full(w[-1] + 1, self.config.offset_std**-2))
        precision[0, 0] = self.config.baseline_error**-2
        precision[np.ix_(w, w)] = self._prior / scale
        x, inverse = np.concatenate(rows), gain_precision(noise)
        precision += x.T @ np.kron(inverse, self.gram) @ x
        right = x.T @ (inverse @ moments).ravel()
        for i in range(2):
            x = leaning_rows(offsets[i], w, slopes[i])
            precision += (x.T * self.counts[i]) @ x / errors[i]
            right += x.T @ self.sums[i] / errors[i]
        covariance = np.linalg.inv(precision)
        return covariance @ right, covariance

    def _gain_lines(self, mean: Floats, second: Floats, variances: Floats) -> tuple[Floats, float]:
        """Returns o_l and λ_l [2], and the factor by which the unit of worths is too small.

        With f = Σ w over an episode's fossils, gains by the loss are regressed on (1, f), with the priors of o_l and
        λ_l, and gains in accuracy less o_a on f, with that of λ_l; ``variances`` [2] are those of the gains.
        """
        _, w = self._places
        squares = (self.gram[1:, 1:] * second[np.ix_(w, w)]).sum()  # E[Σ f²]
        total, kept = self.gram[0, 1:] @ mean[w], self.gram[0, 1:]
        products = self.moments[:, 1:] @ mean[w]  # E[Σ f y], [2]
        weights = variances / self.config.loss_slope_std**2
        stretch = (products[0] - kept @ second[w, 0] + weights[0]) / (squares + weights[0])
        stretch = float(np.clip(stretch, 1 / MAX_STRETCH, MAX_STRETCH))
        least = self.episodes + variances[1] / self.config.baseline_error**2
        normal = [[least, total], [total, squares + weights[1]]]
        line = np.linalg.solve(normal, [self.moments[1, 0], products[1] + self.config.loss_slope * weights[1]])
        return line / (1.0, stretch), stretch

    def _line(self, i: int, mean: Floats, second: Floats, error: float) -> tuple[float, float]:
        """Returns λ and σ² of trials (0) or contributions (1), given E[θ], E[θ θᵀ] and the last σ²."""
        offsets, w = self._places
        config, n, y = self.config, self.counts[i], self.sums[i]
        precision = n @ second[w, w] / error + config.slope_std**-2
        slope = ((y @ mean[w] - n @ second[offsets[i], w]) / error + config.slope / config.slope_std**2) / precision
        x = leaning_rows(offsets[i], w, slope)
        missed = self.squares[i].sum() - 2 * y @ (x @ mean) + n @ (x @ second * x).sum(axis=1)
        return slope, (config.strength * config.noise**2 + missed) / (config.strength + n.sum())

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
        spectra = [np.linalg.eigvalsh(sums[name]) for name in ("gram", "gains")]
        if any(values.min() < -1e-9 * max(1.0, values.max()) for values in spectra) or sums["counts"].min() < 0:
            raise ValueError("the experience has sums that no measurements can have")
        for name, values in sums.items():
            getattr(self, name)[:] = values
        self._worths = self._posterior()  # fails now for sums that belong to no measurements

    def fits(self, state: Mapping[str, Any]) -> bool:
        """Whether a saved experience is of the same slots and blueprints."""
        return (tuple(state["slots"]), tuple(state["blueprints"])) == (self.slots, self.blueprints)


def without_offset(gains: Floats, moments: Floats, counts: Floats, loss_offset: float) -> tuple[Floats, Floats]:
    """Returns Σ y yᵀ [2, 2] and Σ y xᵀ [2, 1 + S·B] of gains less the offset of those by the loss.

    ``counts`` are Σ x, [1 + S·B].
    """
    o, sums = np.array([0.0, loss_offset]), moments[:, 0]
    return gains - np.outer(o, sums) - np.outer(sums, o) + counts[0] * np.outer(o, o), moments - np.outer(o, counts)


def gain_precision(noise: Floats) -> Floats:
    """Returns the inverse [2, 2] of Σ_g; if both errors are nearly the same, that of two gains that count as one.

    On simulated hosts the loss follows from the accuracy, and their difference has no noise. If the slope λ_l were off
    by 1 %, that difference would say that no seed is worth anything, the more surely, the more episodes there are.
    """
    variances = np.diag(noise)
    correlation = abs(noise[0, 1]) / np.sqrt(variances.prod())
    if correlation > MAX_CORRELATION:
        return np.asarray(np.diag(1 / (variances * (1 + correlation))), dtype=np.float64)
    return np.asarray(np.linalg.inv(noise), dtype=np.float64)


def gain_rows(w: Ints, loss_slope: float) -> Floats:
    """Returns x [2, 1 + S·B, D]: the maps from θ to (o_a, w) and to (0, λ_l w). ``w`` [S·B] are the places in θ."""
    seed, x = np.arange(len(w)), np.zeros((2, 1 + len(w), w[-1] + 1))
    x[0, 0, 0] = 1.0
    x[0, 1 + seed, w], x[1, 1 + seed, w] = 1.0, loss_slope
    return x


def leaning_rows(offsets: Ints, w: Ints, slope: float) -> Floats:
    """Returns x [S·B, D] with E[y | θ] = x θ for a trial or contribution y of each seed, given the places in θ of their
    offsets and of w, [S·B] each."""
    seed, x = np.arange(len(w)), np.zeros((len(w), w[-1] + 1))
    x[seed, offsets], x[seed, w] = 1.0, slope
    return x


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
