"""A model in a loop as a backend: its scores, trials, broken seeds and rollbacks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper.core.blueprints import BLUEPRINTS
from esper.grower.grower import Grower
from tests.grower.loops import (
    GROW,
    LENIENT,
    Loop,
    plant,
    same,
    scores,
    script,
    stages,
    weights,
)


def test_scores_are_those_of_the_networks_that_are_named() -> None:
    """All seeds, kept seeds, none; a contribution is the difference to the model without the seed."""
    loop = Loop().run(9)
    step, slot = loop.steps[-1], loop.steps[-1].slots["r0c0"]
    assert slot.stage == "HOLDING"
    assert step.score == pytest.approx(float(scores(loop.model).mean()))
    with loop.grower.hooks.override_alphas({}):
        without = float(scores(loop.model).mean())
    assert step.without_seeds == step.committed == pytest.approx(without)
    assert slot.contribution == pytest.approx(step.score - without)


def test_evaluate_runs_once_for_each_network_and_modes_are_restored() -> None:
    calls = []

    def counted(model: nn.Module) -> Tensor:
        calls.append(1)
        return scores(model)

    loop = Loop()
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


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, 0.01),
    "fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.05),
}
EVERY_EPOCH = LENIENT.with_values(governor={"snapshot_every": 1, "max_rollbacks": 3})


def governed(make: str = "adamw", **arguments: Any) -> Loop:
    return Loop(OPTIMIZERS[make], config=EVERY_EPOCH, governor=True, **arguments)


def grower_of(loop: Loop) -> Grower:
    return loop.grower


def bits(loop: Loop) -> dict[str, Tensor]:
    """Copies of all that a rollback restores, also of steps and moments."""
    copies = weights(loop.model)
    for index, group in enumerate(loop.optimizer.param_groups):
        for number, parameter in enumerate(group["params"]):
            copies[f"{index}.{number}"] = parameter.detach().clone()
            for key, value in loop.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    copies[f"{index}.{number}.{key}"] = value.clone()
    return copies


def break_weights(loop: Loop) -> None:
    with torch.no_grad():
        next(loop.model.parameters())[0, 0] = math.nan


@pytest.mark.parametrize("make", ["fused", "adagrad"])
def test_a_model_with_a_weight_that_is_not_finite_goes_back_to_the_last_snapshot_bit_for_bit(
    make: str,
) -> None:
    loop = governed(make).run(3)  # a seed incubates
    assert len(loop.optimizer.param_groups) == 2
    before = bits(loop)
    loop.train()
    break_weights(loop)
    step = grower_of(loop).step(scores)
    assert step.rollback is not None
    assert step.rollback.reason == "not finite"
    assert step.slots["r0c0"].stage in ("PRUNED", "EMBARGOED")
    assert len(loop.optimizer.param_groups) == 1
    after = bits(loop)
    assert same(
        after,
        {name: value for name, value in before.items() if not name.startswith("1.")},
    )
    assert all(parameter.grad is None for parameter in loop.model.parameters())


def test_a_kept_seed_is_restored_and_a_later_one_removed() -> None:
    later = {**GROW, 10: plant("r0c1")}
    loop = governed(controller=script(later)).run(12)
    grower = grower_of(loop)
    assert loop.steps[-1].slots["r0c0"].stage == "FOSSILIZED"
    before = bits(loop)
    loop.train()
    break_weights(loop)
    step = grower.step(scores)
    assert step.rollback is not None
    assert (step.slots["r0c0"].stage, step.slots["r0c1"].blueprint) == (
        "FOSSILIZED",
        None,
    )
    after = bits(loop)
    assert after.keys() < before.keys()
    assert same(after, {name: before[name] for name in after})


def test_growth_ends_after_the_last_rollback_and_the_loop_goes_on() -> None:
    loop = governed(epochs=12).run(2)
    for _ in range(3):
        loop.train()
        step = grower_of(loop).step(lambda _model: math.nan)
    assert step.done
    assert step.rollback is not None
    assert step.rollback.rollbacks == 3
    loop.run(2)
    assert loop.steps[-1].done
    assert isinstance(grower_of(loop).finish(), nn.Module)


def test_a_governed_loop_that_never_goes_bad_keeps_its_bits() -> None:
    assert same(
        bits(governed().run()),
        bits(Loop(OPTIMIZERS["adamw"], config=EVERY_EPOCH).run()),
    )


def test_a_governed_loop_resumes_with_its_snapshots() -> None:
    whole = governed()
    half = governed()
    for loop in (whole, half):
        loop.run(5)
    saved = {
        "model": weights(half.model),
        "grower": grower_of(half).state_dict(),
        "optimizer": half.optimizer.state_dict(),
    }
    other = governed()
    other.model.load_state_dict(saved["model"])
    grower_of(other).load_state_dict(saved["grower"])
    other.optimizer.load_state_dict(saved["optimizer"])
    other.epoch = half.epoch
    for loop in (whole, other):
        loop.train()
        break_weights(loop)
        step = grower_of(loop).step(scores)
        assert step.rollback is not None
        loop.run(2)
    assert same(bits(whole), bits(other))


def test_without_a_governor_a_score_that_is_not_finite_is_an_error() -> None:
    loop = Loop().run(2)
    loop.train()
    with pytest.raises(ValueError, match="not finite"):
        grower_of(loop).step(lambda _model: math.nan)
