"""The bandit `plans`: it plants what pays best, and carries seeds through."""

import numpy as np
import pytest

from esper.agents.plans import PlansController
from esper.config import TrainingConfig
from esper.core.stage import SeedStage as S
from esper.env.planted import PlantedVectorEnv
from esper.env.planted_law import SimParams
from esper.run.rollout import play_round
from tests.agents.control_helpers import World


def plans(world: World, **settings: float) -> PlansController:
    controller = PlansController(
        world.spec, world.layout, 1, config=TrainingConfig.parse({"plans": settings})
    )
    controller.begin()
    return controller


def test_plans_plants_the_best_blueprint_in_the_best_slot() -> None:
    world = World()
    world.profit[:] = np.array(
        [[1.0, 3.0, -1.0, 0.5], [0.2, 0.1, 5.0, 0.0], [2.0, 1.0, 0.0, 0.0]]
    )
    controller = plans(world)
    assert world.ask(controller) == ("GERMINATE", "r0c1", "depthwise")
    world.put("r0c1", S.FOSSILIZED)
    assert world.ask(controller) == ("GERMINATE", "r0c0", "conv_light")


def test_plans_plants_the_largest_of_the_best_seeds_first() -> None:
    world = World()
    world.profit[:] = np.array(
        [[1.0, 0.9, 0.0, 0.0], [0.0, 3.0, 0.0, 0.0], [2.0, 0.0, -1.0, -1.0]]
    )
    world.size[:] = np.array(
        [[0.4, 0.9, 0.9, 0.9], [0.3, 0.3, 0.3, 0.3], [0.2, 0.5, 0.5, 0.5]]
    )
    controller = plans(world)
    for slot, blueprint in (("r0c0", "norm"), ("r0c1", "conv_light"), ("r1c0", "norm")):
        assert world.ask(controller) == ("GERMINATE", slot, blueprint)
        world.put(slot, S.FOSSILIZED)
    assert world.ask(controller)[0] == "WAIT"


def test_plans_plants_first_what_is_a_part_of_the_host_at_once() -> None:
    world = World()
    world.profit[:] = 1.0
    world.size[:] = np.array([[0.4] * 4, [0.9] * 4, [0.2] * 4])
    world.at_once[2] = 1.0
    assert world.ask(plans(world))[:2] == ("GERMINATE", "r1c0")


def test_plans_plants_nothing_that_does_not_pay() -> None:
    world = World()
    world.profit[:] = -0.1
    assert world.ask(plans(world))[0] == "WAIT"


@pytest.mark.parametrize(
    ("stage", "op"),
    [
        (S.GERMINATED, "ADVANCE"),
        (S.TRAINING, "ADVANCE"),
        (S.BLENDING, "ADVANCE"),
        (S.HOLDING, "FOSSILIZE"),
    ],
)
def test_plans_advances_a_seed_when_its_gate_opens(stage: S, op: str) -> None:
    world = World()
    world.profit[:] = 1.0
    controller = plans(world)
    world.put("r0c1", stage, age=5, gate_passed=0.0)
    assert world.ask(controller)[0] != op
    world.put("r0c1", stage, age=5, gate_passed=1.0)
    assert world.ask(controller)[:2] == (op, "r0c1")


def test_a_seed_that_does_not_leave_incubation_makes_room_for_other_slots() -> None:
    world = World()
    world.profit[:] = np.array([[1.0] * 4, [3.0] * 4, [2.0] * 4])
    controller = plans(world)
    world.put("r0c1", S.TRAINING, age=60, epochs_in_stage=0.3)
    assert world.ask(controller)[0] == "WAIT"
    world.put("r0c1", S.TRAINING, age=60, epochs_in_stage=0.4)
    assert world.ask(controller)[:2] == ("PRUNE", "r0c1")
    world.put("r0c1", S.DORMANT)
    assert world.ask(controller)[:2] == (
        "GERMINATE",
        "r1c0",
    )  # and not again in the slot of the largest profit
    controller.begin()
    assert world.ask(controller)[:2] == ("GERMINATE", "r0c1")


def test_how_long_a_seed_needs_is_a_setting() -> None:
    world = World()
    world.profit[:] = 1.0
    assert world.ask(plans(world))[0] == "GERMINATE"
    assert world.ask(plans(world, min_life_epochs=10_000))[0] == "WAIT"
    world.put("r0c1", S.TRAINING, age=5, gate_passed=1.0)
    assert world.ask(plans(world))[:2] == ("ADVANCE", "r0c1")
    assert world.ask(plans(world, blend=1.0, min_blend_epochs=10_000))[0] != "ADVANCE"


def test_a_resumed_episode_remembers_abandoned_seeds() -> None:
    world = World()
    world.profit[:] = 1.0
    first, second = plans(world), plans(world)
    world.put("r0c0", S.TRAINING, age=60, epochs_in_stage=0.9)
    assert world.ask(first)[0] == "PRUNE"
    second.load_memory_state(first.memory_state())
    world.put("r0c0", S.DORMANT)
    assert world.ask(second) == world.ask(first)
    assert world.ask(second)[1] != "r0c0"


def test_plans_plants_no_seed_that_cannot_be_kept_before_the_end() -> None:
    """A short episode has room for two seeds in turn; a third one would be blended at its end, and be lost."""
    law = SimParams(worth=((6.0,) * 4,) * 3)
    env = PlantedVectorEnv(
        TrainingConfig.parse({"env": {"n_envs": 16, "episode_length": 12}}), law
    )
    play_round(env, PlansController(env.action_spec, env.layout, 16))
    seeds = env.state.slots
    assert not ((seeds.alpha_on > 0) & ~seeds.fossil).any()
    assert (seeds.fossil.sum(axis=1) >= 1).mean() > 0.9
