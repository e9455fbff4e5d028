"""BatchNorm statistics estimated anew for each configuration."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F

from esper.core.stage import SeedStage as S
from esper.training.validate import evaluate
from tests.core_helpers import (
    digits,
    make_training,
    plant,
    rig,
    same_bits,
    tensors_of,
    tiny_config,
    train,
)


def test_a_configuration_is_judged_by_the_statistics_that_it_has_itself() -> None:
    training = make_training()
    plant(training, "r0c0", stage=S.HOLDING)
    train(training, 3)
    batch, split = digits().calibration_inputs(), digits().validation
    before = tensors_of(training, ("r0c0",))
    on, off = [1.0, 0, 0, 0], [0.0, 0, 0, 0]
    found = evaluate(training, split, [tuple(on), tuple(off)], calibrate=batch)
    same_bits(before, tensors_of(training, ("r0c0",)))
    host = copy.deepcopy(training.host)
    for module in host.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = None  # a cumulative mean of one batch
            module.reset_running_stats()
    with torch.no_grad():
        host.train()(batch)
        logits = host.eval()(split.x)
    assert float(found.loss[1]) == pytest.approx(
        float(F.cross_entropy(logits, split.y)), rel=1e-5
    )
    plain = evaluate(training, split, [tuple(on), tuple(off)])
    assert plain.loss[1] != found.loss[1]  # its statistics were another network's
    assert all(
        module.momentum == 0.1
        for module in training.host.modules()
        if isinstance(module, torch.nn.BatchNorm2d)
    )


def test_the_config_asks_for_it() -> None:
    losses = []
    for recalibrate in (False, True):
        with rig(horizon=8, env={"recalibrate": recalibrate}) as world:
            world.grow("r0c0", S.HOLDING)
            losses.append(world.env.state.all_off_loss.item())
    assert losses[0] != losses[1]
    assert tiny_config().env.recalibrate is False
