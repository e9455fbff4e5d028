"""The rise of the learning rate over the first steps."""

from __future__ import annotations

import pytest

from esper.core.blueprints import BLUEPRINTS
from esper.core.ramps import STYLES
from esper.core.site import Role
from esper.training import step as host_step
from esper.training.host_state import host_state, load_host_state
from esper.training.host_training import HostTraining
from esper.training.seed_pool import ParameterGroup
from esper.training.step import train_epoch
from tests.core_helpers import make_training, tiny_config


def rates_of(
    training: HostTraining, epochs: int, monkeypatch: pytest.MonkeyPatch
) -> list[float]:
    """The rate that each step's optimizer read."""
    rates: list[float] = []
    inner = host_step.step_groups

    def note(*arguments: object) -> None:
        rates.append(float(training.rate))
        inner(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(host_step, "step_groups", note)
    for _ in range(epochs):
        train_epoch(training)
    return rates


def warming(optimizer: str, epochs: float, schedule: str = "constant") -> HostTraining:
    """Two steps an epoch."""
    task = {
        "learning_rate": 0.1,
        "schedule": schedule,
        "warmup_epochs": epochs,
        "optimizer": optimizer,
    }
    return make_training(
        tiny_config(horizon=4, task={"samples_per_epoch": 64, "batch_size": 32, **task})
    )


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_rate_rises_linearly_over_the_steps_of_warm_up(
    optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = rates_of(warming(optimizer, 1.5), 3, monkeypatch)
    assert rates == pytest.approx([0.1 / 3, 0.2 / 3, 0.1, 0.1, 0.1, 0.1])


def test_the_rise_multiplies_the_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = rates_of(warming("sgd", 2.0, "cosine"), 2, monkeypatch)
    second = 0.1 * (1 + 0.5**0.5) / 2
    assert rates == pytest.approx([0.025, 0.05, 0.75 * second, second])


def test_the_rise_is_on_the_hosts_clock_and_begins_anew_with_an_episode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training = warming("sgd", 2.0)
    first = list(rates_of(training, 2, monkeypatch))
    training.reset(0, 1)
    training.epoch = 1  # as when a run is resumed there
    assert rates_of(training, 1, monkeypatch) == first[2:]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_seed_has_a_rate_of_its_own_that_rises_after_planting(
    optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = {
        "learning_rate": 0.1,
        "schedule": "constant",
        "warmup_epochs": 1.0,
        "optimizer": optimizer,
    }
    config = tiny_config(
        horizon=4,
        task={
            "samples_per_epoch": 64,
            "batch_size": 32,
            "seed_rate": 2.0,
            "seed_warmup_epochs": 1.5,
            **task,
        },
    )
    training = make_training(config)
    rates: list[tuple[float, ...]] = []
    inner = host_step.step_groups

    def note(groups: list[ParameterGroup], *more: object) -> None:
        rates.append(
            tuple(float(group.optimizer.param_groups[0]["lr"]) for group in groups)
        )
        inner(groups, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(host_step, "step_groups", note)
    train_epoch(training)
    site = training.sites[0]
    training.plant(site, BLUEPRINTS.get("cnn", "norm"), STYLES["LINEAR_ADD"])
    training.assign(site, Role.BLENDED, 1.0, 1.0, learning=True)
    train_epoch(training)
    train_epoch(training)
    assert [host for host, *_ in rates] == pytest.approx(
        [0.05, 0.1, 0.1, 0.1, 0.1, 0.1]
    )
    assert [seed for _, *seeds in rates for seed in seeds] == pytest.approx(
        [0.2 / 3, 0.4 / 3, 0.2, 0.2]
    )


def test_the_rise_of_a_seed_goes_on_in_a_resumed_run() -> None:
    task = {"samples_per_epoch": 64, "batch_size": 32, "seed_warmup_epochs": 3.0}
    first, second = (make_training(tiny_config(horizon=6, task=task)) for _ in range(2))
    for training in (first, second):
        training.reset(0, 0)
    train_epoch(first)
    first.plant(first.sites[0], BLUEPRINTS.get("cnn", "norm"), STYLES["LINEAR_ADD"])
    first.assign(first.sites[0], Role.BLENDED, 1.0, 1.0, learning=True)
    train_epoch(first)
    load_host_state(second, host_state(first), BLUEPRINTS)
    second.assign(second.sites[0], Role.BLENDED, 1.0, 1.0, learning=True)
    for training in (first, second):
        train_epoch(training)
    name = first.sites[0].name
    assert float(second.seed_rates[name].rate) == float(first.seed_rates[name].rate) > 0
    assert second.planted_at == first.planted_at == {name: 1}
