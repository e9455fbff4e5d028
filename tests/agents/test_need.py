"""The controller `need`: it plants where need is largest, and decides all else as the heuristic does."""

from __future__ import annotations

import numpy as np
import pytest

from esper.agents.heuristic import (
    HeuristicController,
    NeedController,
    PlateauController,
)
from esper.agents.make import make_controller
from esper.config import ConfigError, TrainingConfig
from tests.agents.control_helpers import LAYOUT, SPEC, S, World
from tests.core_helpers import rig

MEASURED = {"env": {"need_every": 1}}


def rule(
    kind: type[HeuristicController] = NeedController, **sections: dict[str, float]
) -> HeuristicController:
    config = TrainingConfig.parse({**MEASURED, **sections})
    made = kind(SPEC, LAYOUT, 1, config=config)
    made.begin()
    return made


def needing(**needs: float) -> World:
    """A world without seeds, in which these needs were measured."""
    world = World()
    for slot, need in needs.items():
        world.put(slot, S.DORMANT, need=need, need_measured=1.0)
    return world


def test_it_plants_where_need_is_largest() -> None:
    assert needing(r0c0=0.5, r0c1=0.7, r1c0=0.6).ask(rule())[:2] == (
        "GERMINATE",
        "r0c1",
    )


def test_it_plants_what_the_heuristic_would_plant_there() -> None:
    world = needing(r0c0=0.5)
    assert world.ask(rule()) == world.ask(rule(HeuristicController))


@pytest.mark.parametrize(("threshold", "op"), [(0.39, "GERMINATE"), (0.41, "WAIT")])
def test_it_waits_where_need_is_below_the_threshold(threshold: float, op: str) -> None:
    world = needing(r0c0=0.4, r0c1=0.1)
    assert world.ask(rule(need={"threshold": threshold}))[0] == op


def test_a_slot_that_is_not_measured_is_not_planted_in() -> None:
    world = needing(r0c1=0.5)
    assert world.ask(rule(need={"threshold": 0.0}))[1] == "r0c1"


def test_it_keeps_seeds_as_the_heuristic_does() -> None:
    world = World()
    seed = {"gate_passed": 1.0, "blueprint": 2.0, "contribution": 0.3}
    world.put("r0c0", S.HOLDING, contribution_error=0.01, **seed)
    assert world.ask(rule())[:2] == ("FOSSILIZE", "r0c0")


def test_without_measurements_it_says_what_to_set() -> None:
    with pytest.raises(ConfigError, match=r"env\.need_every.* set it to 1 or more"):
        make_controller("need", "digits", SPEC, LAYOUT, 1, 0)
    with pytest.raises(ConfigError, match=r"env\.need_every.* set it to 1 or more"):
        TrainingConfig.parse({"run": {"controller": "need"}})
    with pytest.raises(ConfigError, match="found no need at any slot"):
        World().ask(rule())


def test_it_grows_a_host_where_need_was_measured() -> None:
    slots = {"slots": ["r0c0", "r2"], "need_every": 1, "at_once": True}
    with rig(horizon=6, env=slots) as world:
        env = world.env
        needs = env.state.slots.need[0].copy()
        controller = NeedController(env.action_spec, env.layout, 1, config=env.config)
        controller.begin()
        actions = controller.act(world.observation, world.info["action_mask"])
        world.step({0: actions[0]})
        (planted,) = np.flatnonzero(env.state.slots.fossil[0])
        assert planted == np.nanargmax(needs)


def test_it_waits_for_the_need_of_layers_that_have_all_just_grown() -> None:
    merging = {"slots": ["r2"], "need_every": 1, "at_once": True, "merge": True}
    with rig(horizon=8, env={**merging, "edits_per_epoch": 8}) as world:
        env = world.env
        controller = NeedController(env.action_spec, env.layout, 1, config=env.config)
        controller.begin()
        while not world.env.done[0]:
            actions = controller.act(world.observation, world.info["action_mask"])
            world.step({0: actions[0]})
            if np.isnan(env.state.slots.need).all():
                resumed = NeedController(
                    env.action_spec, env.layout, 1, config=env.config
                )
                resumed.load_memory_state(controller.memory_state())
                controller = resumed
        assert env.state.slots.merges[0].min() >= 2


def test_plateau_plants_where_need_is_largest_if_it_is_measured() -> None:
    at_once = {"plateau": {"window": 0.0, "min_window_epochs": 1}}
    for world, slot in (
        (needing(r0c0=0.1, r1c0=0.2), "r1c0"),
        (World(), World().ask(rule(HeuristicController))[1]),
    ):
        plateau = rule(PlateauController, **at_once)  # type: ignore[arg-type]
        assert world.ask(plateau)[0] == "WAIT"
        assert world.ask(plateau)[:2] == ("GERMINATE", slot)
