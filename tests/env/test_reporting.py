"""The event of an action: every head by name, and the masked choices."""

from __future__ import annotations

import numpy as np
import pytest

from esper.agents.controller import RandomController
from esper.core.action import HEADS, RELEVANT, Op, joint_actions
from esper.core.mask import legal_joint_actions
from esper.core.stage import SeedStage
from esper.telemetry.event import ActionTaken
from tests.core_helpers import Rig, rig

FREE = {
    "style": "GATED_GATE",
    "tempo": 8,
    "alpha_target": 0.7,
    "alpha_speed": 5,
    "alpha_curve": "logistic_12",
}


def told(world: Rig) -> dict[str, object]:
    """Heads of the last reported action."""
    event = world.of_kind(ActionTaken)[-1]
    return {head: getattr(event, head) for head in HEADS}


@pytest.mark.parametrize(
    ("op", "stage"),
    [
        (Op.GERMINATE, SeedStage.DORMANT),
        (Op.SET_ALPHA_TARGET, SeedStage.HOLDING),
        (Op.PRUNE, SeedStage.HOLDING),
        (Op.FOSSILIZE, SeedStage.HOLDING),
        (Op.ADVANCE, SeedStage.TRAINING),
    ],
)
def test_the_event_names_every_head_that_matters(op: Op, stage: SeedStage) -> None:
    with rig(horizon=12) as world:
        if stage is not SeedStage.DORMANT:
            world.grow("r0c0", stage)
        world.do(op.name, "r0c0", "conv_light", **FREE)
        values = {"op": op.name, "slot": "r0c0", "blueprint": "conv_light", **FREE}
        expected = {
            head: values[head] if head == "op" or head in RELEVANT[op] else None
            for head in HEADS
        }
        assert told(world) == expected
        assert all(
            value in world.env.action_spec.choices(head)
            for head, value in told(world).items()
            if value
        )


def test_masked_choices_are_those_that_no_legal_action_continues_with() -> None:
    """Masked choices are compared with the table of all joint actions, for random actions of four hosts."""
    with rig(n_envs=4, horizon=12, env={"parameter_budget": 0.5}) as world:
        env, spec = world.env, world.env.action_spec
        joint = joint_actions(spec)
        player = RandomController(spec, env.layout, 4, run_seed=3)
        player.begin()
        seen: set[str] = set()
        for _ in range(12):
            legal = legal_joint_actions(joint, world.info["action_mask"])
            actions = player.act(world.observation, world.info["action_mask"])
            world.events.clear()
            world.step(dict(enumerate(actions)))
            for event in world.of_kind(ActionTaken):
                possible, expected = joint[legal[event.env]], {}
                for place, head in enumerate(HEADS):
                    choices = spec.choices(head)
                    names = {
                        str(choices[i])
                        for i in range(len(choices))
                        if i not in possible[:, place]
                    }
                    if names and (head == "op" or head in RELEVANT[Op[event.op]]):
                        expected[head] = names
                    possible = possible[possible[:, place] == actions[event.env, place]]
                assert {
                    head: set(names) for head, names in event.masked.items()
                } == expected
                seen |= set(expected)
        assert seen == {"op", "slot", "blueprint"}


def test_an_action_without_a_probability_has_none_in_its_event() -> None:
    """A log-probability belongs to one step: the next step, which has none, does not inherit it."""
    with rig() as world:
        reporter = world.env.loop.reporter
        assert reporter is not None
        reporter.log_prob = np.array([-1.5])
        world.do("GERMINATE", "r0c0", "norm")
        world.do("PRUNE", "r0c0")
        assert [event.log_prob for event in world.of_kind(ActionTaken)] == [-1.5, None]
