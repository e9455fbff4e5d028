"""Worths of seeds, inferred from gains, trials and contributions."""

import numpy as np
import pytest
import torch

from esper.config import ExperienceConfig
from esper.core.worth import Experience, prior_correlations

SLOTS, BLUEPRINTS = ("r0c0", "r0c1"), ("oak", "ivy", "elm")
SHAPE = (2, 3)
WITHIN = np.kron(np.eye(2), np.eye(3) - 1 / 3)


"""Subtracts from worths [6] the mean of their slot, which plans with a seed in each slot do not tell."""


def experience(**values: float) -> Experience:
    return Experience(SLOTS, BLUEPRINTS, ExperienceConfig(**values))


def nothing(n: int) -> np.ndarray:
    return np.full((n, *SHAPE), np.nan)


def both(gains: np.ndarray) -> np.ndarray:
    """Gains [n] in accuracy, and the same gains by the loss, [n, 2]."""
    return np.stack((gains, gains), axis=1)


def plans(n: int, draw: np.random.Generator) -> np.ndarray:
    """One random blueprint in each slot, bool [n, S, B]."""
    return np.eye(3, dtype=np.bool_)[draw.integers(0, 3, size=(n, 2))]


def test_without_experience_the_worths_are_those_of_the_prior() -> None:
    worths = experience(worth_std=2.0).worths
    np.testing.assert_allclose(worths.mean, 0.0)
    np.testing.assert_allclose(worths.error, worths.scale)
    assert worths.scale == pytest.approx(2.0, rel=1e-6)
    covariance = worths.root @ worths.root.T
    np.testing.assert_allclose(
        covariance, 4.0 * prior_correlations(2, 3, ExperienceConfig()), atol=1e-6
    )


def test_the_prior_is_a_correlation_matrix_with_the_shares_of_the_config() -> None:
    config = ExperienceConfig(shared=0.2, by_blueprint=0.3, by_slot=0.1)
    k = prior_correlations(2, 3, config)
    np.testing.assert_allclose(np.diag(k), 1.0)
    assert k[0, 3] == pytest.approx(0.5)  # the same blueprint in another slot
    assert k[0, 1] == pytest.approx(0.3)  # another blueprint in the same slot
    assert k[0, 4] == pytest.approx(0.2)
    assert np.linalg.eigvalsh(k).min() > 0


def test_many_episodes_reveal_the_worths_and_the_noise() -> None:
    draw = np.random.default_rng(0)
    true = np.array([[4.0, -2.0, 1.0], [0.0, 6.0, 3.0]])
    kept = plans(600, draw)
    found = experience()
    gains = (kept * true).sum(axis=(1, 2))[:, None] + draw.normal(
        0.5, (1.5, 3.0), (600, 2)
    )
    found.add(gains, kept, nothing(600), nothing(600))
    # Each plan has one seed a slot, so an offset of a whole slot is only known by the prior; differences are not.
    for slot in range(2):
        measured = found.worths.mean[slot] - found.worths.mean[slot].mean()
        np.testing.assert_allclose(measured, true[slot] - true[slot].mean(), atol=0.35)
    assert found.worths.noise == pytest.approx(1.5, abs=0.15)
    assert found.episodes == 600
    np.testing.assert_array_equal(found.kept.reshape(SHAPE), kept.sum(axis=0))


def dense_reference(
    gains: np.ndarray,
    kept: np.ndarray,
    leanings: tuple[np.ndarray, np.ndarray],
    config: ExperienceConfig,
) -> tuple[np.ndarray, float, float]:
    """Expectation maximisation with one row for each measurement; returns E[w], s and σ_g after twelve rounds.

    θ = (o, α of trials by slot, α of contributions by slot, w); a leaning of seed j has mean α + λ w_j, and the gain by
    the loss of an episode has mean o_l + λ_l f with f = Σ w.
    """
    correlations = np.linalg.inv(prior_correlations(2, 3, config))
    rows = [
        [
            (j, y)
            for host in kind.reshape(-1, 6)
            for j, y in enumerate(host)
            if np.isfinite(y)
        ]
        for kind in leanings
    ]
    n, guess, loose = len(gains), config.noise**2, config.baseline_error**-2
    hosts = kept.reshape(n, 6).astype(float)
    scale, noise, o_l, by_loss, lines = (
        config.worth_std**2,
        guess * np.eye(2),
        0.0,
        0.0,
        [(0.0, guess)] * 2,
    )

    def row(i: int, j: int, slope: float) -> np.ndarray:
        values = np.zeros(11)
        values[1 + 2 * i + j // 3], values[5 + j] = 1.0, slope
        return values

    for _ in range(12):
        x = np.zeros((n, 2, 11))
        x[:, 0, 0] = 1.0
        x[:, 0, 5:], x[:, 1, 5:] = hosts, by_loss * hosts
        y = gains - np.array([0.0, o_l])
        precision = sum(each.T @ np.linalg.solve(noise, each) for each in x)
        right = sum(
            each.T @ np.linalg.solve(noise, two) for each, two in zip(x, y, strict=True)
        )
        precision[:5, :5] += np.diag([loose, *[config.offset_std**-2] * 4])
        precision[5:, 5:] += correlations / scale
        for i, (slope, error) in enumerate(lines):
            for j, leaning in rows[i]:
                precision += np.outer(row(i, j, slope), row(i, j, slope)) / error
                right += row(i, j, slope) * leaning / error
        covariance = np.linalg.inv(precision)
        mean = covariance @ right
        misses = [(two - each @ mean, each) for each, two in zip(x, y, strict=True)]
        missed = sum(
            np.outer(miss, miss) + each @ covariance @ each.T for miss, each in misses
        )
        noise = (config.strength * guess * np.eye(2) + missed) / (config.strength + n)
        spread = (
            np.trace(correlations @ covariance[5:, 5:])
            + mean[5:] @ correlations @ mean[5:]
        )
        scale = (config.strength * config.worth_std**2 + spread) / (config.strength + 6)
        for i, kind in enumerate(rows):
            error, normal, target = (
                lines[i][1],
                config.slope_std**-2,
                config.slope * config.slope_std**-2,
            )
            for j, leaning in kind:
                a, b = 1 + 2 * i + j // 3, 5 + j
                normal += (mean[b] ** 2 + covariance[b, b]) / error
                target += (
                    leaning * mean[b] - mean[a] * mean[b] - covariance[a, b]
                ) / error
            slope = target / normal
            squares = [
                (leaning - row(i, j, slope) @ mean) ** 2
                + row(i, j, slope) @ covariance @ row(i, j, slope)
                for j, leaning in kind
            ]
            lines[i] = (
                slope,
                (config.strength * guess + sum(squares))
                / (config.strength + len(kind)),
            )
        # The correction of the unit has mean 1, and the standard deviation of λ_l.
        strict = config.loss_slope_std**-2
        by_accuracy, weight = noise[0, 0] * strict, noise[0, 0] * strict
        normal = np.diag([noise[1, 1] * loose, noise[1, 1] * strict])
        target = np.array([0.0, noise[1, 1] * strict * config.loss_slope])
        for host, two in zip(hosts, gains, strict=True):
            f, with_f = (
                host @ mean[5:],
                covariance[:, 5:] @ host,
            )  # E[f], and its covariance with θ
            f2 = f**2 + host @ with_f[5:]
            by_accuracy += f * (two[0] - mean[0]) - with_f[0]
            weight += f2
            normal += np.array([[1.0, f], [f, f2]])
            target += two[1] * np.array([1.0, f])
        stretch = by_accuracy / weight
        o_l, by_loss = np.linalg.solve(normal, target) / (1.0, stretch)
        scale, lines = (
            scale * stretch**2,
            [(slope / stretch, error) for slope, error in lines],
        )
    return mean[5:].reshape(SHAPE), float(np.sqrt(scale)), float(np.sqrt(noise[0, 0]))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {
            "slope": 0.8,
            "slope_std": 0.3,
            "offset_std": 10.0,
            "loss_slope": 0.7,
            "loss_slope_std": 0.25,
        },
    ],
    ids=["default", "other priors"],
)
def test_the_estimates_are_those_of_expectation_maximisation_over_all_measurements(
    settings: dict[str, float],
) -> None:
    draw = np.random.default_rng(7)
    true = np.array([[4.0, -4.0, 1.0], [0.0, 6.0, -3.0]])
    kept = plans(20, draw)
    gains = (kept * true).sum(axis=(1, 2))[:, None] * (1.0, 0.6) + draw.normal(
        1.0, 1.0, (20, 2)
    )
    trials = np.where(
        draw.random(kept.shape) < 0.5,
        0.5 * true + draw.normal(2, 1.0, kept.shape),
        np.nan,
    )
    contributions = np.where(kept, 0.8 * true + draw.normal(9, 2.0, kept.shape), np.nan)
    found, config = experience(**settings), ExperienceConfig(**settings)
    found.add(gains, kept, trials, contributions)
    mean, scale, noise = dense_reference(gains, kept, (trials, contributions), config)
    np.testing.assert_allclose(found.worths.mean, mean, rtol=1e-8)
    assert (found.worths.scale, found.worths.noise) == (
        pytest.approx(scale),
        pytest.approx(noise),
    )


def test_a_loss_that_repeats_the_accuracy_counts_once() -> None:
    """On simulated hosts the difference of both gains has no noise, and must not count. If nearly all
    episodes have the same plan, the slope of the loss is not known exactly."""
    draw = np.random.default_rng(7)
    true, kept = (
        draw.normal(0, 4.0, SHAPE),
        np.eye(3, dtype=np.bool_)[draw.integers(0, 3, (6000, 2))],
    )
    kept[300:] = np.eye(3, dtype=np.bool_)[true.argmax(axis=1)]
    found = experience(max_loss=99.0)
    found.add(
        both((kept * true).sum(axis=(1, 2)) + draw.normal(0, 1.0, 6000)),
        kept,
        nothing(6000),
        nothing(6000),
    )
    np.testing.assert_allclose(
        WITHIN @ found.worths.mean.ravel(), WITHIN @ true.ravel(), atol=0.3
    )


def test_a_gain_without_information_leaves_the_measurements_of_its_seeds() -> None:
    draw = np.random.default_rng(8)
    kept, trials = plans(4, draw), draw.normal(size=(4, *SHAPE))
    gains = np.array([[1.0, 2.0], [np.nan, 1.0], [-2.0, 0.0], [1.0, np.nan]])
    found, known = experience(), experience()
    found.add(gains, kept, trials, trials + 1.0)
    known.add(gains[::2], kept[::2], trials[::2], trials[::2] + 1.0)
    for name in ("gains", "gram", "moments", "kept"):
        np.testing.assert_array_equal(getattr(found, name), getattr(known, name))
    np.testing.assert_array_equal(found.counts, np.full((2, 6), 4.0))
    np.testing.assert_allclose(found.sums[0], trials.sum(axis=0).ravel())


def test_a_large_gain_counts_in_full_and_a_large_loss_does_not() -> None:
    kept = plans(2, np.random.default_rng(9))
    found = experience(max_loss=10.0)
    found.add(np.array([[18.0, 12.0], [-40.0, -11.0]]), kept, nothing(2), nothing(2))
    assert found.moments[:, 0].tolist() == [18.0 - 10.0, 12.0 - 10.0]


def test_a_saved_experience_is_restored_and_one_of_other_hosts_is_refused() -> None:
    draw = np.random.default_rng(5)
    found, copy = experience(), experience()
    kept = plans(5, draw)
    found.add(draw.normal(size=(5, 2)), kept, draw.normal(size=(5, *SHAPE)), nothing(5))
    copy.load_state_dict(found.state_dict())
    np.testing.assert_array_equal(copy.worths.mean, found.worths.mean)
    other = Experience(SLOTS, ("oak", "ivy"), ExperienceConfig())
    with pytest.raises(
        ValueError,
        match=r"blueprints oak, ivy, elm; this host has r0c0, r0c1 and oak, ivy$",
    ):
        other.load_state_dict(found.state_dict())
    found.clear()
    assert (found.episodes, found.worths.mean.any()) == (0, False)


def test_sums_that_belong_to_no_measurements_are_refused() -> None:
    state = experience().state_dict()
    with pytest.raises(ValueError, match="gains of the experience"):
        experience().load_state_dict({**state, "gains": state["gains"] + float("nan")})
    with pytest.raises(ValueError, match="sums that no measurements can have"):
        experience().load_state_dict(
            {**state, "gram": state["gram"] - 10.0 * torch.eye(7)}
        )
