"""The env of a loop: its first observation, early starts, and the baseline."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from esper.config import ConfigError
from esper.env.state import Choices
from tests.grower.loops import LENIENT, Loop, net, same, scores, script, stages, weights


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


class OnlyInTraining(nn.Module):
    """A user's: it cannot run on its training batches in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: Tensor) -> Tensor:
        if not self.training and len(x) == 16:
            raise RuntimeError("no batch of training in eval mode")
        return self.inner(x)  # type: ignore[no-any-return]


def known(loop: Loop) -> Choices:
    """What is known of the model and the seeds after the first epoch."""
    loop.run(1)
    assert loop.grower is not None
    assert loop.grower.env is not None
    return loop.grower.env.choices


def test_the_operations_of_the_model_and_of_seeds_are_those_of_their_weights() -> None:
    choices = known(Loop())
    assert choices.host_flops == sum(2 * p.numel() for p in net().parameters() if p.dim() == 2)
    assert choices.flops.shape == choices.parameters.shape
    assert (choices.flops < 2 * choices.parameters).all()
    assert choices.flops.any()


def test_counting_changes_no_bit_of_the_training() -> None:
    counted, alone = Loop(controller=script({})).run(6), Loop(controller=None).run(6)
    assert same(weights(counted.model), weights(alone.model))


def test_a_loop_that_is_resumed_knows_what_was_counted() -> None:
    first = Loop()
    counted = known(first)
    assert first.grower is not None
    state = first.grower.state_dict()
    other = Loop()
    assert other.grower is not None
    other.grower.load_state_dict(state)
    assert other.grower.env is not None
    assert other.grower.env.choices.host_flops == counted.host_flops
    np.testing.assert_array_equal(other.grower.env.choices.flops, counted.flops)


def test_operations_that_cannot_be_counted_are_unknown_and_no_price() -> None:
    sites = {"r0c0": "inner.body.0"}
    assert known(Loop(model=OnlyInTraining(), sites=sites)).host_flops == 0
    config = LENIENT.with_values(reward={"rent_in": "flops"})
    with pytest.raises(ConfigError, match=r"not known, so reward.rent_in must be parameters"):
        Loop(model=OnlyInTraining(), sites=sites, config=config).run(1)
