"""The heuristic: it advances, keeps what contributes, prunes what harms, and fills every slot."""

import pytest

from esper.config import TrainingConfig
from esper.control.heuristic import HeuristicController
from esper.data.tasks import load_task
from esper.env.vector_env import GrowthVectorEnv
from esper.rollout.rollout import play_round
from esper.spaces.observation import symlog
from esper.telemetry.event import EpisodeCompleted
from tests.control.control_helpers import LAYOUT, SPEC, S, World
from tests.core_helpers import flat_baseline


def heuristic() -> HeuristicController:
    made = HeuristicController(SPEC, LAYOUT, 1)
    made.begin()
    return made


def test_the_heuristic_germinates_on_a_plateau_only() -> None:
    world = World()
    assert world.ask(heuristic())[0] == "GERMINATE"
    world.plateau(2)
    assert world.ask(heuristic())[0] == "WAIT"  # too early to tell
    world.plateau(10)
    world.base["accuracy_3_ago"] = 0.4
    assert world.ask(heuristic())[0] == "WAIT"  # still learning
    world.plateau(10)
    world.base["loss_3_ago"] = symlog(1.5)
    assert world.ask(heuristic())[0] == "WAIT"  # not settled


def test_the_heuristic_advances_when_the_gate_would_open() -> None:
    for stage in (S.GERMINATED, S.TRAINING, S.BLENDING):
        world = World()
        world.put("r0c1", stage, age=1, blueprint=1.0, gate_passed=0.0, gate_score=0.75)
        assert world.ask(heuristic())[0] != "ADVANCE"
        world.slots["r0c1"]["gate_passed"] = 1.0
        assert world.ask(heuristic())[:2] == ("ADVANCE", "r0c1")


@pytest.mark.trap(27)
@pytest.mark.parametrize(
    ("contribution", "error", "kept"), [(0.06, 0.05, True), (0.04, 0.01, False), (0.2, 0.3, False)]
)
def test_the_heuristic_fossilizes_what_contributes(contribution: float, error: float, kept: bool) -> None:
    """Above 0.5 pp and above its standard error."""
    world = World()
    world.put(
        "r1c0", S.HOLDING, age=9, blueprint=1.0, gate_passed=1.0, contribution=contribution, contribution_error=error
    )
    assert (world.ask(heuristic())[:2] == ("FOSSILIZE", "r1c0")) == kept


@pytest.mark.parametrize(("contribution", "age", "pruned"), [(-0.3, 9, True), (-0.3, 4, False), (-0.1, 9, False)])
def test_the_heuristic_prunes_what_harms_after_five_epochs(contribution: float, age: int, pruned: bool) -> None:
    world = World()
    world.put("r0c0", S.HOLDING, age=age, blueprint=1.0, contribution=contribution, contribution_error=0.2)
    assert (world.ask(heuristic())[:2] == ("PRUNE", "r0c0")) == pruned


def test_the_heuristic_prunes_on_a_drop_of_more_than_two_points() -> None:
    for accuracy, pruned in ((0.47, True), (0.485, False)):
        controller, world = heuristic(), World()
        assert world.ask(controller)[:2] == ("GERMINATE", "r0c0")
        world.put("r0c0", S.BLENDING, age=9, blueprint=1.0)
        world.plateau(30, accuracy)
        assert (world.ask(controller)[:2] == ("PRUNE", "r0c0")) == pruned


def test_the_heuristic_rotates_through_blueprints_and_avoids_what_was_pruned() -> None:
    controller, world = heuristic(), World()
    planted = [world.ask(controller)[2] for _ in range(5)]
    assert planted == ["norm", "conv_light", "depthwise", "attention", "norm"]
    world.put("r0c0", S.HOLDING, age=9, blueprint=2.0, contribution=-0.5)
    assert world.ask(controller)[:2] == ("PRUNE", "r0c0")
    world.put("r0c0", S.DORMANT)
    # A penalty of 2 is halved at each germination that follows: conv_light is skipped at 2 and at 1, and not at 1/2.
    assert [world.ask(controller)[2] for _ in range(4)] == ["depthwise", "attention", "norm", "conv_light"]


@pytest.mark.finding("M19")
@pytest.mark.parametrize("count", [1, 3, 4, 9])
def test_the_heuristic_fills_every_slot(count: int) -> None:
    """Of hosts with any number of slots, whatever their names; each slot is planted once."""
    slots = tuple(f"r{i % 2}c{i}" for i in range(count))
    world = World(slots)
    controller = HeuristicController(world.spec, world.layout, 1)
    controller.begin()
    life = {S.GERMINATED: S.TRAINING, S.TRAINING: S.BLENDING, S.BLENDING: S.HOLDING}
    planted = []
    for epoch in range(10, 15 + 6 * count):
        world.plateau(epoch)
        op, slot, blueprint = world.ask(controller)
        if op == "GERMINATE":
            planted.append(slot)
            index = 1.0 + SPEC.blueprints.index(blueprint)
            world.put(slot, S.GERMINATED, blueprint=index, gate_passed=1.0)
        elif op == "ADVANCE":
            world.put(slot, life[world.stage(slot)], age=9, blueprint=1.0, gate_passed=1.0, contribution=0.2)
        elif op == "FOSSILIZE":
            world.put(slot, S.FOSSILIZED, blueprint=1.0)
    assert sorted(planted) == sorted(slots)
    assert {world.stage(slot) for slot in slots} == {S.FOSSILIZED}


@pytest.mark.finding("M19")
@pytest.mark.parametrize("free", range(4))
def test_the_heuristic_plants_in_a_slot_wherever_it_is(free: int) -> None:
    world = World(("r0c0", "r0c1", "r1c0", "r1c1"))
    for place, slot in enumerate(world.spec.slots):
        world.put(slot, S.DORMANT if place == free else S.FOSSILIZED, blueprint=0.0 if place == free else 1.0)
    controller = HeuristicController(world.spec, world.layout, 1)
    controller.begin()
    assert world.ask(controller)[:2] == ("GERMINATE", world.spec.slots[free])


@pytest.mark.trap(27)
def test_the_heuristic_keeps_seeds_of_hosts_in_training() -> None:
    """Contributions are measured for whoever decides, so the rule can win; and it grows in more than one slot."""
    config = TrainingConfig.parse({"task": {"samples_per_epoch": 512}, "env": {"n_envs": 2}})
    ended: list[EpisodeCompleted] = []
    env = GrowthVectorEnv(
        load_task("digits"),
        config,
        emit=lambda event: ended.append(event) if isinstance(event, EpisodeCompleted) else None,
        baseline=flat_baseline(30),
    )
    play_round(env, HeuristicController(env.action_spec, env.layout, 2), seed=0)
    env.close()
    kept = [len(event.fossils) for event in ended]
    assert min(kept) >= 1
    assert max(kept) >= 2
