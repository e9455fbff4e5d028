"""A living seed that becomes non-finite is cut out on the device; the host and its other seeds do not change."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper.core.blueprints import BLUEPRINTS, Blueprint, BlueprintRegistry
from esper.core.site import Site
from esper.core.stage import SeedStage
from esper.telemetry.event import GovernorRollback, SeedCut, StageChanged
from esper.training.validate import evaluate
from tests.core_helpers import (
    Rig,
    SlotView,
    all_finite,
    digits,
    make_training,
    plant,
    rig,
    tensors_of,
    train,
)

S = SeedStage
NAN, INF = float("nan"), float("inf")


def fill(slot: Site | SlotView, value: float, which: int = 0) -> None:
    assert slot.seed is not None
    with torch.no_grad():
        list(slot.seed.parameters())[which].fill_(value)


def one_element(slot: SlotView) -> None:
    assert slot.seed is not None
    with torch.no_grad():
        next(slot.seed.parameters()).flatten()[0] = NAN


INJECTIONS: dict[str, Callable[[SlotView], None]] = {
    "weights NaN": lambda slot: fill(slot, NAN),
    "one weight NaN": one_element,
    "scale infinite": lambda slot: fill(slot, INF, -1),
    "scale overflows": lambda slot: fill(slot, 3e38, -1),
    "scale -inf": lambda slot: fill(slot, -INF, -1),
}


def check_cut(world: Rig, slot: str, blueprint: str, epoch: int) -> None:
    (cut,) = world.of_kind(SeedCut)
    assert (cut.env, cut.slot, cut.blueprint, cut.epoch) == (0, slot, blueprint, epoch)
    assert not world.of_kind(GovernorRollback)
    assert world.info["reward_terms"]["governor"].tolist() == [0.0]
    assert world.slot(slot).seed is None
    last = [
        change
        for change in world.of_kind(StageChanged)
        if change.slot == slot and change.after == "PRUNED"
    ]
    assert [change.cause for change in last] == ["not finite"]
    assert all_finite(world.training())
    assert bool(torch.isfinite(torch.as_tensor(world.observation)).all())
    assert world.host().governor.rollbacks == 0
    assert slot not in world.training().seed_groups


@pytest.mark.parametrize("injection", INJECTIONS)
@pytest.mark.parametrize(
    ("stage", "style"),
    [(S.TRAINING, "LINEAR_ADD"), (S.HOLDING, "GATED_GATE")],
)
def test_a_living_seed_that_breaks_is_cut_without_rollback_or_penalty(
    injection: str, stage: SeedStage, style: str
) -> None:
    with rig(horizon=10) as world:
        world.grow("r0c0", stage, style=style)
        body = world.slot("r0c0").seed
        assert body is not None
        INJECTIONS[injection](world.slot("r0c0"))
        if "scale" in injection and style == "GATED_GATE":
            fill(world.slot("r0c0"), INF, 3)  # conv, norm, norm, scale, then the gate
        world.step()
        check_cut(world, "r0c0", "conv_light", world.host().epoch)
        for _ in range(2):
            world.step()
        assert len(world.of_kind(SeedCut)) == 1
        assert world.training().totals.training[4] == 0


def test_the_host_trains_on_as_if_the_cut_seed_were_not_there() -> None:
    alone, growing = make_training(), make_training()
    fill(plant(growing, "r1c0", stage=S.HOLDING), NAN)
    for _ in range(2):
        train(alone)
        train(growing)
        for name, tensor in tensors_of(alone).items():
            torch.testing.assert_close(
                tensors_of(growing)[name], tensor, rtol=1e-6, atol=1e-7
            )
    assert float(growing.totals.training[4]) == 0


def test_a_seed_that_breaks_in_validation_only_is_seen_there() -> None:
    training = make_training()
    train(training)
    slot = plant(training, "r0c0", stage=S.HOLDING)
    assert slot.planted is not None
    fill(slot, NAN)
    on, off = (
        tuple(alpha * (s.name == "r0c0") for s in training.sites)
        for alpha in (1.0, 0.0)
    )
    result = evaluate(training, digits().validation, [on, off])
    assert not bool(slot.planted.finite)
    assert result.loss[0] == result.loss[1]
    assert torch.equal(result.correct[0], result.correct[1])


class Overflow(nn.Module):
    """Its output is finite and its gradient is not: the branch not taken overflows, and 0 · inf is NaN."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((channels, 1, 1), 0.1))
        self.late = False

    def forward(self, h: Tensor) -> Tensor:
        # Only when switched on, as a seed that trains for a while and then breaks.
        return self.scale * (
            torch.where(h < 1e9, h, torch.exp(200 * h)) if self.late else h
        )


def own(build: Callable[[int], nn.Module]) -> BlueprintRegistry:
    blueprint = Blueprint(
        "cnn", "own", "a test's own", build, lambda channels: channels
    )
    return BlueprintRegistry((BLUEPRINTS.get("cnn", "conv_light"), blueprint))


@pytest.mark.parametrize("stage", [S.BLENDING, S.HOLDING])
def test_a_living_seed_whose_backward_pass_breaks_is_cut_too(stage: SeedStage) -> None:
    """Its backward pass would make the host's gradient NaN although every output is finite."""
    with rig(horizon=10, blueprints=own(Overflow)) as world:
        world.grow("r0c0", stage, "own")
        seed: Any = world.slot("r0c0").seed
        seed.body.late = True
        world.step()
        check_cut(world, "r0c0", "own", world.host().epoch)


@pytest.mark.parametrize("value", [NAN, 3e38])
@pytest.mark.parametrize("upstream", ["r0c0", "r1c0"])
def test_a_broken_incubating_seed_does_not_take_a_blended_one_with_it(
    upstream: str, value: float
) -> None:
    """The shadow pass and the trial of the broken one run through the blended one, with broken features."""
    with rig(horizon=12) as world:
        world.grow("r0c1", S.HOLDING)
        world.grow(upstream, S.TRAINING)
        fill(world.slot(upstream), value, -1)
        world.step()
        assert [event.slot for event in world.of_kind(SeedCut)] == [upstream]
        assert world.slot("r0c1").stage is S.HOLDING
        assert all_finite(world.training())


@pytest.mark.parametrize("stage", [S.BLENDING, S.HOLDING])
@pytest.mark.parametrize("downstream", ["r1c0", "r1c1"])
def test_a_broken_blended_seed_does_not_take_an_incubating_one_with_it(
    downstream: str, stage: SeedStage
) -> None:
    """The shadow pass of the healthy one runs through the broken one, which the host's own pass has found out."""
    with rig(horizon=14) as world:
        world.grow(downstream, stage)
        world.grow("r0c0", S.TRAINING)
        if stage is S.BLENDING:  # it stays there until it is advanced
            assert world.slot(downstream).stage is S.BLENDING
        fill(world.slot(downstream), NAN, -1)
        world.step()
        assert [event.slot for event in world.of_kind(SeedCut)] == [downstream]
        assert world.slot("r0c0").stage is S.TRAINING
        world.step()
        assert len(world.of_kind(SeedCut)) == 1


@pytest.mark.parametrize("scale", [1e6, 1e30])
def test_a_seed_that_explodes_but_stays_finite_never_leaves_a_broken_host(
    scale: float,
) -> None:
    """The seed is cut or the host rolled back, and all that is left is finite."""
    with rig(horizon=12) as world:
        world.grow("r1c0", S.HOLDING)
        fill(world.slot("r1c0"), scale, -1)
        for _ in range(4):
            world.step()
            assert all_finite(world.training())
            assert bool(torch.isfinite(torch.as_tensor(world.observation)).all())
