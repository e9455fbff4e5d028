"""Simulated hosts: noise, losses, worths, and accuracies of all configurations."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from esper.agents.controller import NoGrowth
from esper.config import TrainingConfig
from esper.core.action import Op
from esper.core.stage import SeedStage
from esper.env.planted import PlantedVectorEnv
from esper.env.planted_backend import PlantedBackend
from esper.env.planted_law import SimParams
from tests.env.planted_helpers import life, planted, play

QUIET = SimParams(noise=0.0, paired_noise=0.0)


def test_noise_has_its_standard_deviation_and_moves_all_configurations_together() -> (
    None
):
    env = planted(64)
    steps = play(env, NoGrowth(env.action_spec, env.layout, 64))
    errors = np.array(
        [
            info["validation_accuracy"] - info["baseline_accuracy"]
            for _, _, info in steps
        ]
    )
    assert errors.std() == pytest.approx(
        0.3, rel=0.1
    )  # 3264 draws: 1.2 % standard error
    assert abs(errors.mean()) < 0.03
    np.testing.assert_array_equal(
        steps[-1][2]["validation_accuracy"], steps[-1][2]["committed_accuracy"]
    )


def test_the_loss_of_every_configuration_follows_its_accuracy() -> None:
    env = planted(4)
    env.reset(seed=0)
    rows, fleet = life(env, 0, "fern"), env.state
    for epoch in range(20):
        env.step(np.tile(rows.get(epoch, env.action_spec.encode(Op.WAIT)), (4, 1)))
        for accuracy, loss in (
            (fleet.accuracy, fleet.loss),
            (fleet.committed, fleet.committed_loss),
            (fleet.all_off, fleet.all_off_loss),
        ):
            np.testing.assert_allclose(loss, np.log(10) * (100 - accuracy) / 90)
    assert (fleet.committed_loss < fleet.all_off_loss).all()


def test_neighbours_of_positive_worth_help_each_other() -> None:
    law = replace(QUIET, synergy=2.0)
    env = planted(1, law=law)
    env.reset(seed=0)
    seeds, hosts = env.state.slots, env.backend
    seeds.stage[0] = [SeedStage.FOSSILIZED] * 3
    seeds.blueprint[0] = [1, 2, 2]  # 8, 9 and −5 pp
    seeds.alpha[0] = [1.0, 0.5, 1.0]
    hosts.experience[:] = 1e9
    true = hosts.true_accuracies(seeds, np.array([50]))
    host = law.host_accuracy(np.array([50]), 50)
    np.testing.assert_allclose(true.interaction, [[1.0, 1.0, 0.0]])  # 2 · 1 · 0.5
    np.testing.assert_allclose(true.contribution, [[9.0, 5.5, -5.0]])
    np.testing.assert_allclose(true.committed - host, [8 + 4.5 - 5 + 1])


def test_a_host_leans_on_what_is_blended_until_it_is_kept() -> None:
    law = replace(QUIET, reliance=10.0)
    leaning, free = PlantedBackend(law, 1, 50, 1), PlantedBackend(QUIET, 1, 50, 1)
    env = PlantedVectorEnv(TrainingConfig.parse({"env": {"n_envs": 1}}), law)
    seeds = env.state.slots
    seeds.blueprint[0] = [1, 2, 0]
    seeds.alpha[0] = [1.0, 0.5, 1.0]
    seeds.stage[0] = [SeedStage.FOSSILIZED, SeedStage.HOLDING, SeedStage.TRAINING]
    for hosts in (leaning, free):
        hosts.experience[:] = 1e9
    with_it, without = (
        hosts.true_accuracies(seeds, np.array([50])) for hosts in (leaning, free)
    )
    np.testing.assert_allclose(with_it.accuracy, without.accuracy)
    np.testing.assert_allclose(
        with_it.contribution - without.contribution, [[10.0, 5.0, 0.0]]
    )
    np.testing.assert_allclose(
        with_it.committed, without.committed - 5.0
    )  # the fossil stays, the other one goes
    np.testing.assert_allclose(with_it.all_off, without.all_off - 15.0)
