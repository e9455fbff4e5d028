"""Counted compute, against numbers computed by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from esper.agents.controller import RandomController
from esper.compare.compute import (
    ComputeMeter,
    EpochKind,
    Occupant,
    episodes,
    watch,
)
from esper.config import TrainingConfig
from esper.core.blueprints import BLUEPRINTS
from esper.core.ramps import STYLES
from esper.data.task import resolve
from esper.data.tasks import load_task
from esper.env.vector_env import GrowthVectorEnv
from esper.hosts.example import counting
from esper.run.rollout import play_round
from esper.training.host_trainer import HostTrainer
from esper.training.host_training import HostTraining
from esper.training.step import train_epoch
from tests.core_helpers import EASY_GATES

SAMPLES, VALIDATED = 128, 400
# Multiply-accumulates of one image in the host of `digits`: two 3x3 convolutions and the head.
FIRST, SECOND, HEAD = 1 * 3 * 9 * 64, 3 * 6 * 9 * 16, 6 * 10
FORWARD = FIRST + SECOND + HEAD
BACKWARD = FORWARD + SECOND + HEAD  # of weights, and of inputs but for the image
"""Behind the first convolution: 3 channels of 8x8."""
NORM = Occupant("norm", STYLES["LINEAR_ADD"])
CONV = Occupant("conv_light", STYLES["LINEAR_ADD"])


def meter(**env: Any) -> ComputeMeter:
    task = replace(load_task("digits"), slots=None)
    config = TrainingConfig.parse(
        {"task": {"samples_per_epoch": 150, "batch_size": 64}, "env": env}
    )
    return ComputeMeter(task, resolve(config, task), BLUEPRINTS.copy())


def kind(occupant: Occupant | None, *alphas: float) -> EpochKind:
    rest = (0.0,) * 2
    return EpochKind((occupant, None, None), tuple((alpha, *rest) for alpha in alphas))


def test_a_host_alone_by_hand() -> None:
    """Two operations a multiply-accumulate; of 150 samples an epoch trains on two full batches."""
    training, validation = meter().of_epoch(EpochKind.alone(3))
    assert training == 2 * (FORWARD + BACKWARD) * SAMPLES
    assert validation == 2 * FORWARD * VALIDATED


def test_a_transformer_counts_attention_too() -> None:
    task = load_task("chars")
    config = resolve(TrainingConfig(), task)
    training, validation = ComputeMeter(task, config, BLUEPRINTS.copy())._a_sample(
        EpochKind.alone(2)
    )
    width, length = 64, 64
    layer = (
        12 * length * width**2 + 2 * length**2 * width
    )  # projections and MLP; scores and mixing
    head = length * width * task.classes
    assert validation == 2 * (2 * layer + head)
    assert training == 3 * validation  # every product has two in the backward pass


def test_an_incubating_seed_costs_a_pass_of_the_rest_of_the_host() -> None:
    """The pass goes through the seed and the layers after it, whose weights get no gradient from it."""
    alone, _ = meter().of_epoch(EpochKind.alone(3))
    incubating = Occupant(
        "norm", STYLES["LINEAR_ADD"], incubating=True
    )  # of no counted operation itself
    training, _ = meter().of_epoch(kind(incubating, 0.0, 1.0))
    rest = SECOND + HEAD
    assert (
        training - alone == 2 * (rest + rest) * SAMPLES
    )  # forward, and the gradient of inputs


def test_straight_through_a_seed_costs_itself_only() -> None:
    alone, _ = meter().of_epoch(EpochKind.alone(3))
    incubating = Occupant("norm", STYLES["LINEAR_ADD"], incubating=True)
    assert meter(incubation="ste").of_epoch(kind(incubating, 0.0, 1.0))[0] == alone


def test_a_blended_seed_costs_itself_and_a_frozen_one_less() -> None:
    alone, _ = meter().of_epoch(EpochKind.alone(3))
    learning = meter().of_epoch(kind(CONV, 1.0))[0] - alone
    frozen = (
        meter().of_epoch(kind(Occupant("conv_light", CONV.style, learning=False), 1.0))[
            0
        ]
        - alone
    )
    assert 0 < frozen < learning
    assert learning == pytest.approx(
        1.5 * frozen
    )  # forward, inputs, and only in one of them weights


def test_validation_counts_what_configurations_do_not_share() -> None:
    """The configurations with and without the seed share the first convolution."""
    _, alone = meter().of_epoch(EpochKind.alone(3))
    _, both = meter().of_epoch(kind(NORM, 1.0, 0.0))
    assert both - alone == 2 * (SECOND + HEAD) * VALIDATED


class CountingExecutor:
    """Does all work in this thread, under PyTorch's counter."""

    cancelled = False

    def __init__(self) -> None:
        self.flops = 0

    def run(self, work: Callable[[Any], None], envs: Iterable[Any]) -> None:
        with counting() as counter:
            for env in envs:
                work(env)
        self.flops += counter.get_total_flops()

    def train(self, hosts: Iterable[HostTraining], then: Any = None) -> None:
        self.run(train_epoch, hosts)
        if then is not None:
            self.run(then, hosts)

    def adopt(self, hosts: Iterable[HostTraining]) -> None:
        """Captures nothing."""

    def release(self, hosts: Iterable[HostTraining]) -> None:
        """Releases nothing."""

    def reasons(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        """Holds nothing to close."""


@pytest.mark.parametrize(
    ("task", "env"),
    [
        pytest.param("digits", {}, marks=pytest.mark.slow),
        ("digits", {"incubation": "ste", "counterfactual_every": 3}),
        pytest.param("chars", {}, marks=pytest.mark.slow),
    ],
    ids=["shadow", "straight-through", "transformer"],
)
def test_counted_compute_is_that_of_all_passes(task: str, env: dict[str, Any]) -> None:
    """The counter of all passes of random growth agrees with the sum over kinds of epochs."""
    loaded = load_task(task)
    sizes = {
        "n_envs": 2,
        "episode_length": 8,
        "baseline_episodes": 1,
        "one_incubating": False,
        "gates": EASY_GATES,
    }
    config = TrainingConfig.parse(
        {
            "task": {"name": task, "samples_per_epoch": 16, "batch_size": 8},
            "env": {**sizes, **env},
        }
    )
    few = slice(0, 24)
    small = type(loaded.validation)(
        loaded.validation.x[few], loaded.validation.y[few], loaded.validation.table
    )
    hosts = GrowthVectorEnv(replace(loaded, validation=small, test=small), config)
    meter = ComputeMeter(hosts.task, hosts.config, hosts.blueprints)
    hosts.prepare()
    hosts.executor.close()
    executor = CountingExecutor()
    hosts.executor = executor  # type: ignore[assignment]
    hosts.backend.trainer = HostTrainer(hosts.task, hosts.training, executor)  # type: ignore[arg-type]
    hosts.backend.map_hosts(watch)
    play_round(hosts, RandomController(hosts.action_spec, hosts.layout, 2), 3)
    assert executor.flops > 0
    each = hosts.backend.map_hosts(episodes)
    assert sum(map(meter.flops, each)) == pytest.approx(executor.flops, rel=1e-9)
    assert len(set(each[0][1:])) > 2  # more than one kind of epoch
