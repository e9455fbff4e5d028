"""Running statistics: exact while cumulative, moving afterwards, frozen between updates."""

import numpy as np
import pytest
import torch

from esper.agents.ppo.normalization import (
    ObservationStatistics,
    RewardNormalizer,
    RunningMeanStd,
)
from esper.config import PPOConfig
from esper.core.observation import (
    BASE,
    PER_CHOICE,
    PER_SLOT,
    FeatureKind,
    ObservationLayout,
    split,
)

CPU = torch.device("cpu")


def test_cumulative_updates_equal_the_statistics_of_all_rows() -> None:
    draw = np.random.default_rng(0)
    batches = [torch.from_numpy(draw.normal(3, 2, size=(n, 4))) for n in (5, 1, 40, 17)]
    running = RunningMeanStd(4, CPU, PPOConfig())
    for batch in batches:
        running.merge(batch)
    rows = torch.cat(batches)
    torch.testing.assert_close(running.mean, rows.mean(dim=0))
    torch.testing.assert_close(running.var, rows.var(dim=0, unbiased=False))


def observations(slots: int, rows: int = 40) -> torch.Tensor:
    """Continuous entries far from 0; flags and blueprint indices as they would be."""
    draw = np.random.default_rng(slots)
    layout = ObservationLayout(
        tuple(f"r{i}c0" for i in range(slots)), ("oak", "ivy"), horizon=6
    )
    values = draw.normal(3, 2, size=(rows, layout.size))
    for place, entry in enumerate(layout.entries):
        if entry.kind is not FeatureKind.CONTINUOUS:
            values[:, place] = draw.integers(0, 2, size=rows)
    return torch.from_numpy(values.astype(np.float32))


def test_all_slots_share_one_set_of_statistics() -> None:
    running = ObservationStatistics(3, CPU, PPOConfig())
    batch = observations(slots=3)
    running.update(batch[:25])
    running.update(batch[25:])
    groups = [group.double().flatten(0, -2) for group in split(batch, 3)]
    assert [len(group) for group in groups] == [40, 40 * 3, 40 * 3 * 2]
    torch.testing.assert_close(
        running.mean, torch.cat([group.mean(dim=0) for group in groups])
    )
    torch.testing.assert_close(
        running.var, torch.cat([group.var(dim=0, unbiased=False) for group in groups])
    )
    assert running.count == 40


@pytest.mark.parametrize("slots", [1, 2, 6])
def test_statistics_of_three_slots_apply_to_any_number(slots: int) -> None:
    learned, running = (ObservationStatistics(n, CPU, PPOConfig()) for n in (3, slots))
    learned.update(observations(slots=3))
    running.load_state_dict(learned.state_dict())
    raw = observations(slots)
    seen = running.normalize(raw)
    layout = ObservationLayout(
        tuple(f"r{i}c0" for i in range(slots)), ("oak", "ivy"), horizon=6
    )
    names = [entry.name for entry in (*BASE, *PER_SLOT, *PER_CHOICE)]
    for place, entry in enumerate(layout.entries):
        own = names.index(entry.name.rpartition("/")[2])
        expected = raw[:, place]
        if entry.kind is FeatureKind.CONTINUOUS:
            expected = (
                (expected - running.mean[own]) / (running.var[own] + 1e-8).sqrt()
            ).float()
        if entry.kind is FeatureKind.FIXED:
            expected = (expected - entry.typical) / entry.spread
        torch.testing.assert_close(seen[:, place], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["host_parameters", "rent", "samples_known"])
def test_an_entry_that_never_varied_is_zero_whatever_its_value(name: str) -> None:
    running = ObservationStatistics(2, CPU, PPOConfig())
    place = [entry.name for entry in BASE].index(name)
    batch = observations(slots=2)
    batch[:, place] = 0.56
    for rows in batch.split(8):
        running.update(rows)
    other = batch.clone()
    other[:, place] = 0.87  # a larger host
    assert torch.equal(running.normalize(other), running.normalize(batch))
    running.update(other)
    assert (running.normalize(other)[:, place] != 0).all()


def test_moving_average_includes_the_shift_of_the_mean() -> None:
    running = RunningMeanStd(
        1, CPU, PPOConfig(observation_warm_updates=1, observation_decay=0.75)
    )
    running.merge(torch.tensor([[0.0], [2.0]]))  # mean 1, variance 1
    running.merge(torch.tensor([[5.0], [5.0]]))  # mean 5, variance 0
    # mean 0.75·1 + 0.25·5 = 2; variance 0.75·1 + 0.25·0 + 0.75·0.25·(5 − 1)² = 3.75
    assert running.mean.item() == pytest.approx(2.0)
    assert running.var.item() == pytest.approx(3.75)


def test_normalised_values_are_clipped() -> None:
    running = ObservationStatistics(1, CPU, PPOConfig())
    running.update(observations(slots=1))
    seen = running.normalize(1e9 * observations(slots=1).sign())
    assert seen[:, : len(BASE)][
        :, running.continuous[: len(BASE)]
    ].unique().tolist() == [-10.0, 10.0]


def test_rewards_are_divided_by_the_std_of_discounted_returns_that_end_with_episodes() -> (
    None
):
    normalizer = RewardNormalizer(CPU, PPOConfig(gamma=0.5, reward_std_floor=0.01))
    rewards = torch.tensor([[1.0], [2.0], [4.0]])
    ends = torch.tensor([[False], [True], [False]])
    every = torch.ones(3, 1, dtype=torch.bool)
    normalizer.update(rewards, ends, every, every)
    # running returns: 1, 0.5·1 + 2 = 2.5, and after the end 4
    assert normalizer.scale == pytest.approx(np.std([1.0, 2.5, 4.0]))


def test_returns_are_discounted_and_counted_by_epochs() -> None:
    normalizer = RewardNormalizer(CPU, PPOConfig(gamma=0.5, reward_std_floor=0.01))
    rewards = torch.tensor([[1.0], [-0.25], [-0.25], [2.0]])
    trained = torch.tensor([[True], [False], [False], [True]])
    never = torch.zeros(4, 1, dtype=torch.bool)
    normalizer.update(rewards, never, ~never, trained)
    assert normalizer.scale == pytest.approx(np.std([1.0, 0.5 * (1.0 - 0.5) + 2.0]))


def test_reward_scale_has_a_floor_and_idle_steps_do_not_count() -> None:
    normalizer = RewardNormalizer(CPU, PPOConfig(gamma=0.5, reward_std_floor=0.1))
    rewards = torch.tensor([[1.0, 0.0], [0.5, 99.0]])
    valid = torch.tensor([[True, False], [True, False]])
    assert normalizer.scale == 1.0
    normalizer.update(
        rewards, torch.zeros(2, 2, dtype=torch.bool), valid, valid
    )  # real returns 1 and 1: no spread
    assert normalizer.scale == 0.1
