"""A seed's life through the env: clocks, gates, momentum, caps, and what is automatic."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from esper.core.stage import SeedStage
from esper.telemetry.event import ActionTaken, GateEvaluated, StageChanged
from esper.training import step as host_step
from esper.training.host_training import HostTraining
from esper.training.step import train_step
from tests.core_helpers import Rig, rig

S = SeedStage


def history(world: Rig, slot: str) -> list[tuple[int, str, str]]:
    """(epochs done, stage entered, cause)."""
    return [
        (e.epoch, e.after, e.cause)
        for e in world.of_kind(StageChanged)
        if e.slot == slot
    ]


def test_a_seeds_life_by_actions() -> None:
    with rig() as world:
        world.grow("r0c0", S.FOSSILIZED)
        assert history(world, "r0c0") == [
            (0, "GERMINATED", "germinate"),
            (1, "TRAINING", "advance"),
            (2, "BLENDING", "advance"),
            (4, "HOLDING", "advance"),
            (5, "FOSSILIZED", "fossilize"),
        ]
        assert [(e.gate, e.passed) for e in world.of_kind(GateEvaluated)] == [
            ("G0", True),
            ("G1", True),
            ("G2", True),
            ("G3", True),
            ("G5", True),
        ]


def before_training(monkeypatch: pytest.MonkeyPatch, look: Callable[[], None]) -> None:
    """Calls ``look`` before the first training step of every epoch."""

    def look_and_train(training: HostTraining, *rest: Any) -> None:
        if training.batch == 0:
            look()
        train_step(training, *rest)

    monkeypatch.setattr(host_step, "train_step", look_and_train)


def test_a_stage_entered_by_an_action_counts_its_epoch_and_the_ramp_starts_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A ramp in three steps trains at 1/3, 2/3 and then 1; observations show what the next epoch trains at."""
    with rig(run={"tier": "eager"}) as world:
        world.grow("r0c0", S.TRAINING)
        assert world.value("r0c0/epochs_in_stage") == pytest.approx(1 / 8)
        assert world.value("r0c0/age") == pytest.approx(2 / 8)
        trained_at: list[float] = []
        before_training(
            monkeypatch, lambda: trained_at.append(world.slot("r0c0").alpha)
        )
        shown = []
        for op in ("ADVANCE", "WAIT", "WAIT"):
            world.do(op, "r0c0")
            shown.append(world.value("r0c0/alpha"))
        assert trained_at == pytest.approx([1 / 3, 2 / 3, 1.0])
        assert shown == pytest.approx([2 / 3, 1.0, 1.0])


def test_a_refused_advance_changes_nothing_and_says_why() -> None:
    with rig(env={"gates": {"min_training_epochs": 3}}) as world:
        world.grow("r0c0", S.TRAINING)
        world.do("ADVANCE", "r0c0")
        assert world.slot("r0c0").stage is S.TRAINING
        event = world.of_kind(ActionTaken)[-1]
        assert not event.accepted
        assert "epochs in TRAINING: 1, at least 3 required" in event.reason
        assert world.info["reward_terms"]["action_cost"].tolist() == [-0.01]


def test_automatic_gates_open_by_themselves_one_a_step() -> None:
    with rig(env={"auto_advance": ["G1", "G2", "G3"]}) as world:
        world.do("GERMINATE", "r0c0", "conv_light", tempo=3)
        stages = [world.slot("r0c0").stage]
        for _ in range(4):
            world.step()
            stages.append(world.slot("r0c0").stage)
        assert stages == [S.TRAINING, *[S.BLENDING] * 2, *[S.HOLDING] * 2]
        assert world.slot("r0c0").epochs_in_stage == 1


@pytest.mark.trap(6)
def test_a_seed_that_blocks_an_automatic_g2_is_pruned_in_the_end() -> None:
    with rig(
        horizon=10,
        env={
            "auto_advance": ["G2"],
            "max_training_epochs": 3,
            "gates": {"min_training_epochs": 9},
        },
    ) as world:
        world.grow("r0c0", S.TRAINING)
        world.step()
        assert world.slot("r0c0").stage is S.TRAINING
        world.step()
        assert world.slot("r0c0").stage is S.PRUNED
        assert history(world, "r0c0")[-1] == (4, "PRUNED", "stuck in training")


def momentum(world: Rig, slot: str) -> dict[str, Any]:
    training = world.training()
    groups = {"host": training.host_group}
    if slot in training.seed_groups:
        groups[slot] = training.seed_groups[slot]
    return {
        name: (
            group.optimizer,
            [
                group.optimizer.state[p].get("momentum_buffer")
                for p in group.parameters
                if p in group.optimizer.state
            ],
        )
        for name, group in groups.items()
    }


def copies(found: dict[str, Any]) -> dict[str, list[torch.Tensor]]:
    return {
        name: [buffer.clone() for buffer in buffers]
        for name, (_, buffers) in found.items()
    }


@pytest.mark.finding("H7")
def test_momentum_lives_through_every_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizers are the same objects, and each buffer the same storage with the same values, before and after
    every change of stage; in between they move."""
    with rig(horizon=14, env={"min_prune_age": 1}, run={"tier": "eager"}) as world:
        world.grow("r0c0", S.TRAINING, style="GATED_GATE")
        script: list[tuple[Any, ...]] = [
            ("ADVANCE", {}),
            ("WAIT", {}),
            ("ADVANCE", {}),
            ("SET_ALPHA_TARGET", {"alpha_target": 0.5, "alpha_speed": 3}),
            ("WAIT", {}),
            ("SET_ALPHA_TARGET", {"alpha_target": 1.0}),
            ("ADVANCE", {}),
            ("FOSSILIZE", {}),
            ("WAIT", {}),
        ]
        moved = {"host": 0, "r0c0": 0}
        between: list[dict[str, Any]] = []
        before_training(
            monkeypatch, lambda: between.append(copies(momentum(world, "r0c0")))
        )
        for op, heads in script:
            before = momentum(world, "r0c0")
            values = copies(before)
            assert len(values["r0c0"]) == 8  # conv, norm (2), scale, gate (4)
            world.do(op, "r0c0", **heads)
            for name, (optimizer, buffers) in momentum(world, "r0c0").items():
                assert optimizer is before[name][0]
                assert [b.data_ptr() for b in buffers] == [
                    b.data_ptr() for b in before[name][1]
                ]
                assert all(
                    torch.equal(a, b)
                    for a, b in zip(between[-1][name], values[name], strict=True)
                )
                moved[name] += any(
                    not torch.equal(a, b)
                    for a, b in zip(buffers, values[name], strict=True)
                )
        assert world.slot("r0c0").stage is S.FOSSILIZED
        assert moved["host"] == len(script)
        assert (
            moved["r0c0"] == len(script) - 2
        )  # frozen in the two epochs that trained with a falling alpha


@pytest.mark.trap(15)
def test_the_next_seed_in_a_slot_starts_with_its_own_optimizer() -> None:
    with rig(horizon=14) as world:
        world.grow("r0c0", S.HOLDING)
        assert all(
            s["momentum_buffer"].any()
            for s in world.training().seed_groups["r0c0"].optimizer.state.values()
        )
        world.do("PRUNE", "r0c0")
        assert "r0c0" not in world.training().seed_groups
        world.step()
        world.step()
        assert world.slot("r0c0").stage is S.DORMANT
        world.do("GERMINATE", "r0c0", "conv_light")
        new = world.training().seed_groups["r0c0"]
        momenta = [
            new.optimizer.state[parameter]["momentum_buffer"]
            for parameter in new.parameters
        ]
        assert momenta
        assert not any(bool(buffer.any()) for buffer in momenta)
        assert new.optimizer.state.keys() == set(new.parameters)
        slot = world.slot("r0c0")
        assert (slot.age, slot.fading, slot.contribution) == (1, False, None)
        assert slot.alpha == 0
        for group in (world.training().host_group, new):
            assert len(group.optimizer.param_groups) == 1
