"""A model in a loop as a backend: its scores, trials and broken seeds."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from esper.seeds.blueprints import BLUEPRINTS
from tests.grower.loops import (
    Loop,
    plant,
    scores,
    script,
    stages,
)


def test_scores_are_those_of_the_networks_that_are_named() -> None:
    """All seeds, kept seeds, none; a contribution is the difference to the model without the seed."""
    loop = Loop().run(9)
    step, slot = loop.steps[-1], loop.steps[-1].slots["r0c0"]
    assert slot.stage == "HOLDING"
    assert step.score == pytest.approx(float(scores(loop.model).mean()))
    assert loop.grower is not None
    with loop.grower.hooks.trying({}):
        without = float(scores(loop.model).mean())
    assert step.without_seeds == step.committed == pytest.approx(without)
    assert slot.contribution == pytest.approx(step.score - without)


def test_a_trial_is_scored_with_the_seed_at_its_target() -> None:
    loop = Loop().run(4)
    step = loop.steps[-1]
    assert loop.grower is not None
    with loop.grower.hooks.trying({"r0c0": 1.0}):
        tried = float(scores(loop.model).mean())
    assert step.slots["r0c0"].trial == pytest.approx(tried - step.score)
    assert step.score == step.without_seeds


def test_evaluate_runs_once_for_each_network_and_modes_are_restored() -> None:
    calls = []

    def counted(model: nn.Module) -> Tensor:
        calls.append(1)
        return scores(model)

    loop = Loop()
    assert loop.grower is not None
    numbers = []
    for _ in range(9):
        loop.train()
        loop.model.body[3].eval()
        calls.clear()
        loop.grower.step(counted)
        numbers.append(len(calls))
        assert loop.model.training
        assert not loop.model.body[3].training
    assert numbers == [1, 1, 3, 2, 2, 2, 2, 2, 2], (
        "one network is scored twice, which shows noise in scores"
    )


def test_a_seed_that_becomes_non_finite_is_cut_and_the_model_survives() -> None:
    loop = Loop().run(4)
    assert loop.grower is not None
    with torch.no_grad():
        loop.grower.groups.groups["r0c0"]["params"][0].fill_(math.nan)
    loop.run(1)
    assert stages(loop)[-1] in ("PRUNED", "EMBARGOED")
    assert all(bool(p.isfinite().all()) for p in loop.model.parameters())
    assert len(loop.optimizer.param_groups) == 1


def test_a_seed_that_cannot_be_planted_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry = BLUEPRINTS.copy()
    registry.register("mlp", "wrong", parameters=lambda channels: 1)(
        lambda channels: nn.Linear(channels, channels)
    )
    actions = {epoch: plant("r0c0", "wrong") for epoch in range(4)}
    Loop(controller=script(actions), blueprints=registry).run(5)
    assert [record.getMessage() for record in caplog.records] == [
        "a seed was not planted: wrong in r0c0: it has 156 parameters, but its `parameters` says 1"
    ]
