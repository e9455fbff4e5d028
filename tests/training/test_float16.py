"""float16: gradients of a scaled loss, whose scale belongs to one host (finding H3, trap 34)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper.core.blueprints import BLUEPRINTS, Blueprint, BlueprintRegistry
from esper.core.stage import SeedStage as S
from esper.telemetry.event import GovernorRollback, SeedCut
from esper.training.execution.workers import WorkerExecutor
from esper.training.host_training import HostTraining
from esper.training.precision import Arithmetic
from esper.training.snapshot import Snapshot, ValidationRecord
from esper.training.step import prepare_epoch, train_epoch, train_step
from tests.core_helpers import (
    digits,
    plant,
    rig,
    same_bits,
    tensors_of,
    train,
)
from tests.training.test_cut import Overflow
from tests.training.test_foreign_hosts import training_of

FP16: dict[str, Any] = {"task": {"precision": "float16"}}
HUGE = 2.0**120
"""At this scale every gradient of a loss overflows float16, and stays finite in float32."""


def scaler_of(training: HostTraining) -> torch.amp.GradScaler:
    scaler = training.arithmetic._scaler
    assert scaler is not None
    return scaler


def set_scale(training: HostTraining, scale: float) -> None:
    scaler_of(training).load_state_dict(
        {**scaler_of(training).state_dict(), "scale": scale}
    )


@pytest.mark.finding("H3")
def test_the_step_is_that_of_the_loss_whatever_its_scale() -> None:
    found = []
    for scale in (2.0**4, 2.0**8):
        training = training_of(digits(), **FP16)
        plant(training, "r0c0")
        set_scale(training, scale)
        train_step(
            training,
            prepare_epoch(training),
            digits().train.x[:32],
            digits().train.y[:32],
        )  # type: ignore[union-attr]
        found.append(tensors_of(training, ("r0c0",)))
        summaries = training.gradient_stats.summaries(training.gradient_stats.packed())
        found[-1]["norm"] = torch.tensor(
            [summaries["host"].norm, summaries["r0c0"].norm]
        )
    for name, tensor in found[0].items():
        torch.testing.assert_close(tensor, found[1][name], rtol=1e-2, atol=1e-5)


@pytest.mark.finding("H3")
def test_an_overflow_skips_the_step_and_halves_the_scale_and_does_nothing_else() -> (
    None
):
    training = training_of(digits(), **FP16)
    plant(training, "r0c0", stage=S.HOLDING)
    plant(training, "r0c1")
    set_scale(training, HUGE)
    names = ("r0c0", "r0c1")
    weights = {
        name: tensor
        for name, tensor in tensors_of(training, names).items()
        if "parameter" in name or "mom" in name
    }
    groups = prepare_epoch(training)
    x, y = digits().train.x[:32], digits().train.y[:32]  # type: ignore[union-attr]
    for step in range(1, 4):
        train_step(training, groups, x, y)
        assert scaler_of(training).get_scale() == HUGE / 2**step
    now = tensors_of(training, names)
    same_bits(
        {n: t for n, t in weights.items() if "tracked" not in n},
        {n: now[n] for n in weights if "tracked" not in n},
    )
    assert all(
        bool(slot.planted.finite) for slot in training.sites if slot.planted is not None
    )
    summaries = training.gradient_stats.summaries(training.gradient_stats.packed())
    assert [summary.not_finite for summary in summaries.values()] == [0, 0, 0]
    set_scale(training, 1024.0)
    train_step(training, groups, x, y)
    assert scaler_of(training).get_scale() == 1024
    now = tensors_of(training, names)
    assert not torch.equal(weights["r0c0.parameter.0"], now["r0c0.parameter.0"])
    # Means are over the batches that were measured: an overflow is no sign of ill health.
    summaries = training.gradient_stats.summaries(training.gradient_stats.packed())
    assert all(
        summary.health == 1 and summary.norm > 0 for summary in summaries.values()
    )
    assert summaries["host"].elements == sum(
        p.numel() for p in training.host_group.parameters
    )


@pytest.mark.finding("H3")
def test_an_overflow_is_no_reason_to_cut_a_seed_or_to_roll_back() -> None:
    with rig(horizon=12, **FP16) as world:
        world.grow("r0c0", S.HOLDING)
        world.grow("r0c1", S.TRAINING)
        set_scale(world.training(), HUGE)
        rate = scaler_of(world.training()).get_scale()
        for _ in range(3):
            world.step()
            assert scaler_of(world.training()).get_scale() < rate
        assert not world.of_kind(SeedCut)
        assert not world.of_kind(GovernorRollback)
        assert (world.slot("r0c0").stage, world.slot("r0c1").stage) == (
            S.HOLDING,
            S.TRAINING,
        )


@pytest.mark.finding("H3")
@pytest.mark.parametrize("stage", [S.BLENDING, S.HOLDING])
def test_a_gradient_that_no_scale_makes_finite_is_the_seeds_fault_after_all(
    stage: S,
) -> None:
    """Otherwise the host behind it would skip every later step without an error."""

    class Bad(Overflow):
        def forward(self, h: Tensor) -> Tensor:
            return self.scale * (
                torch.where(h < 1e4, h, torch.exp(200 * h)) if self.late else h
            )

    own = Blueprint("cnn", "own", "a test's own", Bad, lambda channels: channels)
    registry = BlueprintRegistry((BLUEPRINTS.get("cnn", "conv_light"), own))
    with rig(
        horizon=30,
        blueprints=registry,
        task={"precision": "float16", "samples_per_epoch": 320},
    ) as world:
        world.grow("r0c1", stage, "own")
        seed: Any = world.slot("r0c1").seed
        seed.body.late = True
        for _ in range(3):
            world.step()
        assert [cut.slot for cut in world.of_kind(SeedCut)] == ["r0c1"]
        assert not world.of_kind(GovernorRollback)
        before = tensors_of(world.training())
        world.step()
        assert not torch.equal(
            before["host.parameter.0"], tensors_of(world.training())["host.parameter.0"]
        )


@pytest.mark.trap(34)
def test_every_host_has_a_scale_of_its_own() -> None:
    def trained(
        scales: dict[int, float], workers: int
    ) -> list[tuple[dict[str, Tensor], float]]:
        envs = [training_of(digits(), index=index, **FP16) for index in range(3)]
        for index, scale in scales.items():
            set_scale(envs[index], scale)
        assert len({id(scaler_of(training)) for training in envs}) == 3
        with WorkerExecutor(workers) as pool:
            for _ in range(2):
                pool.run(train_epoch, envs)
        return [
            (tensors_of(training), scaler_of(training).get_scale()) for training in envs
        ]

    plain, disturbed = trained({}, 1), trained({1: HUGE}, 3)
    for index in (0, 2):
        same_bits(plain[index][0], disturbed[index][0])
        assert plain[index][1] == disturbed[index][1]
    assert disturbed[1][1] == HUGE / 2**4  # two epochs of two batches


@pytest.mark.trap(15)
def test_the_scale_of_one_episode_is_not_the_next_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training, fresh = training_of(digits(), **FP16), training_of(digits(), **FP16)
    set_scale(training, HUGE)
    train(training)
    place = scaler_of(training)._scale
    for one in (training, fresh):
        one.reset(0, 1)
        assert scaler_of(one).get_scale() == 2.0**16
        train(one)
    same_bits(tensors_of(training), tensors_of(fresh))
    assert scaler_of(training)._scale is place  # where a captured step finds it
    # A step that breaks between unscaling and the update of the scale leaves nothing behind.
    with monkeypatch.context() as patch:
        patch.setattr("esper.training.step.grad_stats", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(training)
    for one in (training, fresh):
        one.reset(0, 2)
        train(one)
    same_bits(tensors_of(training), tensors_of(fresh))


def test_a_rollback_puts_the_scale_back() -> None:
    training = training_of(digits(), **FP16)
    snapshot = Snapshot()
    snapshot.save(training, ValidationRecord(2.3, 10.0, 10.0, 2.3), {})
    set_scale(training, HUGE)
    train(training)
    snapshot.restore(training)
    assert scaler_of(training).get_scale() == 2.0**16


@pytest.mark.finding("H3")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_other_formats_have_no_scale(precision: Any) -> None:
    arithmetic = Arithmetic(precision, torch.device("cpu"))
    loss = torch.tensor(2.0)
    assert arithmetic.scaled(loss) is loss
    assert arithmetic.overflow_mask(torch.tensor([False])) is None
    arithmetic.unscale([torch.optim.SGD([nn.Parameter(loss)], lr=0.1)])
    arithmetic.update()
    arithmetic.reset()


@pytest.mark.parametrize("stage", [S.TRAINING, S.HOLDING])
def test_a_delta_that_float16_cannot_hold_is_the_seeds_fault(stage: S) -> None:
    """Seeds end in a float32 factor: what is finite there can be infinite in the host's features."""
    with rig(horizon=12, **FP16) as world:
        world.grow("r0c0", stage)
        seed: Any = world.slot("r0c0").seed
        with torch.no_grad():
            seed.body[-1].weight.fill_(1e6)
        world.step()
        assert [cut.slot for cut in world.of_kind(SeedCut)] == ["r0c0"]
        assert not world.of_kind(GovernorRollback)
