"""The env of a loop: its first observation, early starts, and the baseline."""

from __future__ import annotations

import pytest
import torch

from tests.grower.loops import Loop, same, scores, stages, weights


def test_a_loop_that_starts_early_plants_before_its_first_epoch() -> None:
    loop, usual = Loop(early=True).run(), Loop().run()
    assert [step.epoch for step in loop.steps] == list(range(15))
    assert [step.epoch for step in usual.steps] == list(range(1, 15))
    assert stages(loop) == [*stages(usual), stages(usual)[-1]]  # each an epoch earlier
    assert [step.done for step in loop.steps] == [False] * 14 + [True]


def test_a_loop_that_starts_early_trains_the_same_bits_until_a_seed_is_blended_in() -> None:
    early, alone = Loop(early=True).run(5), Loop(controller=None).run(5)
    assert stages(early)[-1] == "BLENDING"
    early, alone = Loop(early=True).run(4), Loop(controller=None).run(4)
    assert same(weights(early.model), weights(alone.model))


def test_the_baseline_of_a_loop_that_starts_early_begins_with_its_own_first_score() -> None:
    baseline = [0.5 + 0.01 * epoch for epoch in range(14)]
    early, usual = Loop(early=True, baseline=baseline).run(), Loop(baseline=baseline).run()
    for loop, first in ((early, (early.steps[0].score,)), (usual, ())):
        assert loop.grower is not None
        assert loop.grower.env is not None
        assert loop.grower.env.rules is not None
        expected = [100 * score for score in (*first, *baseline)]
        assert loop.grower.env.rules.baseline.accuracy == pytest.approx(expected)


def test_evaluate_may_forbid_gradients_before_the_first_epoch() -> None:
    loop = Loop()
    assert loop.grower is not None
    step = loop.grower.start(torch.inference_mode()(scores))
    assert step.action is not None
    assert step.action.accepted
    loop.run(14)
    assert stages(loop)[-1] == "FOSSILIZED"
