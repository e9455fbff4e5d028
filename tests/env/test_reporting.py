"""The event of an action: every head by name, and the masked choices."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from esper.agents.controller import RandomController
from esper.core.action import HEADS, RELEVANT, Op, joint_actions
from esper.core.mask import legal_joint_actions
from esper.core.stage import SeedStage
from esper.data.split import Split
from esper.data.task import MAX_CLASSES
from esper.telemetry.event import ActionTaken, EpisodeCompleted
from tests.core_helpers import DAMAGE, Rig, digits, rig

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


def classes(world: Rig) -> list[tuple[float, ...]]:
    return [event.class_accuracy for event in world.of_kind(EpisodeCompleted)]


def test_an_episode_ends_with_the_accuracy_of_the_committed_network_on_each_class() -> (
    None
):
    with rig(n_envs=2, horizon=10) as world:
        world.grow("r0c0", SeedStage.FOSSILIZED)
        world.grow("r0c1", SeedStage.BLENDING, env=1)
        world.step()
        shares = np.bincount(digits().validation.y) / len(digits().validation)
        by_class = np.array(classes(world))
        assert by_class.shape == (2, 10)
        state = world.env.state
        assert by_class @ shares == pytest.approx(state.committed)
        assert state.accuracy[1] != state.committed[1]
        assert len(set(by_class[0])) > 1


def test_a_host_that_was_rolled_back_in_its_last_epoch_has_no_accuracy_by_class() -> (
    None
):
    with rig(n_envs=2, horizon=1) as world:
        DAMAGE["NaN weight"](world.training(1))
        world.step()
        of_first, of_second = classes(world)
        assert len(of_first) == 10
        assert of_second == ()


def test_targets_that_are_not_one_class_have_no_labels() -> None:
    task = digits()
    y = task.validation.y
    assert task.labels is not None
    assert task.labels.tolist() == y.tolist()
    others = [
        {"score": lambda outputs, y: -outputs.logsumexp(1)},
        {"classes": MAX_CLASSES + 1},
    ]
    for fields in others:
        assert replace(task, **fields).labels is None, fields
    texts = Split.of_text(y, 4)
    of_texts = replace(task, train=texts, validation=texts, test=texts)
    assert of_texts.labels is None


def test_the_level_says_whether_hosts_and_waits_are_reported() -> None:
    told: dict[str, Counter[str]] = {}
    for level in ("minimal", "normal", "debug"):
        with rig(n_envs=2, horizon=3, telemetry={"level": level}) as world:
            world.do("GERMINATE", "r0c0", "norm")
            world.step()
            world.step()
            told[level] = Counter(type(event).__name__ for event in world.events)
            waits = [e for e in world.of_kind(ActionTaken) if e.op == "WAIT"]
            assert len(waits) == (5 if level == "debug" else 0)
    assert told["minimal"] == {"BaselineMeasured": 1}
    assert told["normal"]["EpochCompleted"] == 6
    assert told["debug"] - told["normal"] == {"ActionTaken": 5}
