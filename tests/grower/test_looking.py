"""A look at a model before anything is planted: its operations, and those of its seeds."""

from __future__ import annotations

import numpy as np
import pytest
from torch import Tensor, nn

import esper
from esper.config import ConfigError
from esper.env.state import Choices
from tests.grower.loops import LENIENT, Loop, net, same, script, weights


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
    """The sizes of the model and the seeds, known after the first epoch."""
    loop.run(1)
    assert loop.grower is not None
    assert loop.grower.env is not None
    return loop.grower.env.choices


def test_the_operations_of_the_model_and_of_seeds_are_those_of_their_weights() -> None:
    choices = known(Loop())
    assert choices.host_flops == sum(
        2 * p.numel() for p in net().parameters() if p.dim() == 2
    )
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
    with pytest.raises(
        ConfigError, match=r"not known, so reward.rent_in must be parameters"
    ):
        Loop(model=OnlyInTraining(), sites=sites, config=config).run(1)


def test_a_model_that_cannot_run_in_eval_mode_needs_a_topology() -> None:
    sites = {"r0c0": "inner.body.0"}
    with pytest.raises(
        esper.ConfigError,
        match=r"which fails: .*no batch of training in eval mode.*if topology= says",
    ):
        Loop(model=OnlyInTraining(), sites=sites, topology=None).run(1)
    assert Loop(model=OnlyInTraining(), sites=sites, topology="mlp").run(1).steps
