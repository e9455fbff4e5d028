"""Controllers on synthetic views and in the env: legal, patient, and fed by observation and mask alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from esper.config import ConfigError, TrainingConfig
from esper.control.controller import Controller, EnvView, NoGrowth, PerEnvController
from esper.control.heuristic import HeuristicController
from esper.control.names import make_controller
from esper.control.random import RandomController
from esper.control.script import ScheduleEntry, ScriptedController, read_schedule
from esper.data.tasks import load_task
from esper.env.vector_env import GrowthVectorEnv
from esper.lifecycle.stage import STAGES, SeedStage
from esper.rollout.rollout import play_round
from esper.spaces.action import RELEVANT, ActionSpec, Op
from esper.spaces.mask import ActionMask
from esper.spaces.observation import BASE, PER_SLOT, ObservationLayout, symlog
from esper.telemetry.event import EpisodeCompleted
from tests.core_helpers import Rig, flat_baseline, rig
from tests.spaces.spaces_helpers import one_observation

S = SeedStage
SPEC = ActionSpec(("r0c0", "r0c1", "r1c0"), ("norm", "conv_light", "depthwise", "attention"))
LAYOUT = ObservationLayout(SPEC.slots, 150)


class World:
    """A made-up env: what the controller sees, and slots that follow its actions."""

    def __init__(self, slots: tuple[str, ...] = SPEC.slots) -> None:
        self.spec = ActionSpec(slots, SPEC.blueprints)
        self.layout = ObservationLayout(slots, LAYOUT.horizon)
        self.base = {entry.name: 0.0 for entry in BASE}
        self.slots = {slot: {entry.name: 0.0 for entry in PER_SLOT} for slot in slots}
        for slot in slots:
            self.put(slot, S.DORMANT)
        self.plateau(10)

    def put(self, slot: str, stage: SeedStage, age: int = 0, **values: float) -> None:
        flags = {f"stage_{other.name.lower()}": float(other is stage) for other in STAGES}
        self.slots[slot] = {**{entry.name: 0.0 for entry in PER_SLOT}, **flags, "age": age / 150, **values}

    def plateau(self, epoch: int, accuracy: float = 0.5, loss: float = 1.0) -> None:
        """Nothing has moved for five epochs."""
        self.base.update(epoch=epoch / 150, validation_accuracy=accuracy, validation_loss=symlog(loss))
        for ago in range(1, 6):
            self.base[f"accuracy_{ago}_ago"], self.base[f"loss_{ago}_ago"] = accuracy, symlog(loss)

    def stage(self, slot: str) -> SeedStage:
        return next(stage for stage in STAGES if self.slots[slot][f"stage_{stage.name.lower()}"])

    def masks(self) -> dict[str, NDArray[np.bool_]]:
        table = np.zeros((1, 6, len(self.slots)), dtype=np.bool_)
        stages = [self.stage(slot) for slot in self.spec.slots]
        busy = any(stage in (S.GERMINATED, S.TRAINING, S.PRUNED, S.EMBARGOED, S.RESETTING) for stage in stages)
        for place, stage in enumerate(stages):
            table[0, Op.GERMINATE, place] = stage is S.DORMANT and not busy
            table[0, Op.ADVANCE, place] = stage in (S.GERMINATED, S.TRAINING, S.BLENDING)
            table[0, Op.FOSSILIZE, place] = stage is S.HOLDING
            table[0, Op.PRUNE, place] = stage in (S.GERMINATED, S.TRAINING, S.BLENDING, S.HOLDING)
            table[0, Op.SET_ALPHA_TARGET, place] = stage in (S.BLENDING, S.HOLDING)
        return ActionMask.build(table, np.ones((1, len(self.slots), 4), dtype=np.bool_)).heads(self.spec)

    def ask(self, controller: Controller) -> tuple[str, str, str]:
        """The controller's op, slot and blueprint."""
        observation = one_observation(self.layout, self.base, self.slots)[None]
        op, slot, blueprint = controller.act(observation, self.masks())[0][:3]
        return Op(op).name, self.spec.slots[slot], self.spec.blueprints[blueprint]


def heuristic() -> HeuristicController:
    made = HeuristicController(SPEC, LAYOUT, 1)
    made.begin()
    return made


def test_a_view_reads_the_observation_by_name() -> None:
    world = World()
    world.put("r0c1", S.HOLDING, age=37, blueprint=2.0, contribution=0.3)
    masks = {name: mask[0] for name, mask in world.masks().items()}
    view = EnvView(SPEC, LAYOUT, one_observation(LAYOUT, world.base, world.slots), masks)
    assert (view.epoch, view.age("r0c1"), view.stage("r0c1")) == (10, 37, S.HOLDING)
    assert (view.blueprint("r0c1"), view.blueprint("r0c0")) == ("conv_light", None)
    assert view.slot("r0c1", "contribution") == pytest.approx(0.3)
    assert view.legal(Op.FOSSILIZE, "r0c1")
    assert not view.legal(Op.FOSSILIZE, "r0c0")
    assert view.legal(Op.GERMINATE, "r0c0", "norm")
    assert not view.legal(Op.GERMINATE, "r0c1", "norm")


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


def script(*entries: dict[str, Any]) -> ScriptedController:
    made = ScriptedController([ScheduleEntry(**entry) for entry in entries], SPEC, LAYOUT, 1)
    made.begin()
    return made


def test_a_script_waits_for_its_epoch_for_the_mask_and_for_the_gate() -> None:
    controller = script(
        {"epoch": 5, "op": "GERMINATE", "slot": "r0c1", "blueprint": "depthwise"},
        {"epoch": 6, "op": "ADVANCE", "slot": "r0c1"},
        {"epoch": 6, "op": "GERMINATE", "slot": "r1c0", "blueprint": "norm"},
    )
    world = World()
    world.plateau(4)
    assert world.ask(controller)[0] == "WAIT"
    world.plateau(5)
    assert world.ask(controller) == ("GERMINATE", "r0c1", "depthwise")
    world.put("r0c1", S.GERMINATED, gate_passed=0.0)
    world.plateau(8)
    assert world.ask(controller)[0] == "WAIT"  # the gate is shut, and the other germination is masked out
    world.slots["r0c1"]["gate_passed"] = 1.0
    assert world.ask(controller)[:2] == ("ADVANCE", "r0c1")
    world.put("r0c1", S.BLENDING)
    assert world.ask(controller) == ("GERMINATE", "r1c0", "norm")
    assert world.ask(controller)[0] == "WAIT"


def test_a_scripts_entries_of_one_slot_keep_their_order_and_do_not_hold_up_others() -> None:
    controller = script(
        {"epoch": 0, "op": "ADVANCE", "slot": "r0c0"},
        {"epoch": 0, "op": "PRUNE", "slot": "r0c0"},
        {"epoch": 0, "op": "GERMINATE", "slot": "r0c1", "blueprint": "norm"},
    )
    world = World()
    world.put("r0c0", S.BLENDING)
    assert world.ask(controller)[:2] == ("GERMINATE", "r0c1")
    assert world.ask(controller)[0] == "WAIT"
    world.slots["r0c0"]["gate_passed"] = 1.0
    assert world.ask(controller)[0] == "ADVANCE"
    assert world.ask(controller)[0] == "PRUNE"


def test_a_script_starts_again_with_each_episode() -> None:
    controller = script({"epoch": 0, "op": "GERMINATE", "slot": "r0c0", "blueprint": "norm"})
    world = World()
    first = [world.ask(controller)[0] for _ in range(2)]
    controller.begin()
    assert [first, [world.ask(controller)[0] for _ in range(2)]] == [["GERMINATE", "WAIT"]] * 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a schedule consists of"),
        ("[[action]]\nepoch = 1\nop = 'PRUNE'", "slot"),
        ("[[action]]\nepoch = 1\nop = 'PRUNE'\nslot = 'r0c0'\nspeed = 3", "alpha_speed"),
        ("[[action]]\nepoch = -1\nop = 'PRUNE'\nslot = 'r0c0'", "epoch"),
        ("[[action", "TOML"),
    ],
)
def test_a_schedule_that_cannot_be_read_says_what_would_be_right(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "schedule.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_schedule(path)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"op": "GROW", "slot": "r0c0"}, "GERMINATE"),
        ({"op": "PRUNE", "slot": "r7c7"}, "r0c0, r0c1, r1c0"),
        ({"op": "GERMINATE", "slot": "r0c0", "blueprint": "lora"}, "conv_light"),
    ],
)
def test_a_schedule_for_another_host_is_refused_before_it_runs(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        script({"epoch": 0, **entry})


def test_a_controller_is_made_by_its_name_and_an_unknown_name_lists_the_known() -> None:
    for name in ("heuristic", "random", "none"):
        assert isinstance(make_controller(name, "digits", SPEC, LAYOUT, 1, 0), PerEnvController)
    for name in ("schedule:", "ppo", "Random"):
        with pytest.raises(ConfigError, match="heuristic, random, none, schedule"):
            make_controller(name, "digits", SPEC, LAYOUT, 1, 0)


def run(world: Rig, controller: Controller, steps: int) -> list[tuple[Any, Any, Any]]:
    """(observation, masks, actions) of every step; a finished env is started again."""
    seen = []
    controller.begin()
    for _ in range(steps):
        masks = world.info["action_mask"]
        actions = controller.act(world.observation, masks)
        seen.append((world.observation, masks, actions))
        world.step(dict(enumerate(actions)))
        assert not world.info["illegal_actions"].any()
        ended = world.terminated | world.truncated
        if ended.any():
            world.reset(options={"reset_mask": ended})
            controller.begin(ended)
    return seen


@pytest.mark.finding("M2")
def test_every_controller_plays_the_same_env_which_does_not_depend_on_who_played_before() -> None:
    """One env for all of them; what it shows and does is the same for the same actions."""
    with rig(n_envs=2, horizon=3) as world:
        spec, layout = world.env.action_spec, world.env.layout

        def play(name: str) -> list[tuple[Any, Any, Any]]:
            world.reset(seed=4)
            controller = make_controller(name, "digits", spec, layout, 2, 7)
            controller.begin()
            seen = []
            for _ in range(3):
                actions = controller.act(world.observation, world.info["action_mask"])
                seen.append((world.observation, world.info["action_mask"], actions))
                world.step(dict(enumerate(actions)))
            return seen

        first = play("none")
        for name in ("random", "heuristic", "schedule"):
            observation, masks, _ = play(name)[0]
            np.testing.assert_array_equal(observation, first[0][0])
            assert all(np.array_equal(masks[head], mask) for head, mask in first[0][1].items())
            for again, once in zip(play("none"), first, strict=True):
                np.testing.assert_array_equal(again[0], once[0])


def test_random_play_is_legal_for_hundreds_of_steps_and_tries_every_op() -> None:
    with rig(n_envs=2, horizon=25) as world:
        controller = RandomController(world.env.action_spec, world.env.layout, 2, run_seed=1)
        seen = run(world, controller, 150)
        ops = {Op(int(op)) for _, _, actions in seen for op in actions[:, 0]}
        assert ops == set(Op)
        for _, _, actions in seen:
            for row in actions:
                relevant = ("op", *RELEVANT[Op(int(row[0]))])
                for head, value in zip(("op", "slot", "blueprint", "style", "tempo"), row, strict=False):
                    assert head in relevant or value == 0


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


@pytest.mark.trap(27)
@pytest.mark.parametrize("name", ["random", "heuristic", "none", "schedule"])
def test_decisions_use_only_observation_and_mask(name: str) -> None:
    """A second controller that never saw the env decides the same from what was sent over the seam."""
    with rig(n_envs=2, horizon=15, task={"samples_per_epoch": 256}) as world:
        spec, layout = world.env.action_spec, world.env.layout
        first, second = (make_controller(name, "digits", spec, layout, 2, 7) for _ in range(2))
        seen = run(world, first, 15)
    second.begin()
    for observation, masks, actions in seen:
        np.testing.assert_array_equal(second.act(observation, masks), actions)


def test_random_draws_of_an_env_do_not_depend_on_the_others() -> None:
    world = World()
    observation, masks = one_observation(LAYOUT, world.base, world.slots)[None], world.masks()
    one, three = RandomController(SPEC, LAYOUT, 1, 3), RandomController(SPEC, LAYOUT, 3, 3)
    one.begin()
    three.begin()
    tripled = {name: np.repeat(mask, 3, axis=0) for name, mask in masks.items()}
    rows = []
    for _ in range(20):
        alone, among = one.act(observation, masks), three.act(np.repeat(observation, 3, axis=0), tripled)
        assert np.array_equal(alone[0], among[0])
        rows.append(among)
    assert any(not np.array_equal(row[0], row[1]) for row in rows)
    assert any(not np.array_equal(rows[0][0], row[0]) for row in rows)


def test_no_growth_waits() -> None:
    world, controller = World(), NoGrowth(SPEC, LAYOUT, 1)
    world.put("r0c0", S.HOLDING, gate_passed=1.0, contribution=1.0)
    controller.begin()
    assert world.ask(controller)[0] == "WAIT"
