"""Masks are exact: in every state that random play reaches, against the rules written out again."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from esper.lifecycle.stage import SeedStage
from esper.spaces.action import HEADS, Op
from tests.core_helpers import Rig, rig, wait_actions
from tests.seeds.blueprints.test_cnn import FORMULAS
from tests.selection import slow_except

S = SeedStage
LIVING = (S.GERMINATED, S.TRAINING, S.BLENDING, S.HOLDING)
COOLDOWN = (S.PRUNED, S.EMBARGOED, S.RESETTING)


class Known:
    """State that the rules depend on, read once."""

    def __init__(self, world: Rig, index: int) -> None:
        self.env = world.env.config.env
        self.slots = [world.slot(name, index) for name in world.env.action_spec.slots]
        self.stages = [slot.stage for slot in self.slots]
        self.age, self.steady = (
            [slot.age for slot in self.slots],
            [slot.steady for slot in self.slots],
        )
        self.used = sum(
            p.numel()
            for slot in self.slots
            if slot.seed is not None
            for p in slot.seed.parameters()
        )


def expected(known: Known, op: Op, place: int, blueprint: str) -> bool:
    """The rules of the action space, from the state of the slots."""
    env, stages, stage = known.env, known.stages, known.stages[place]
    auto = env.auto_advance
    if op is Op.WAIT:
        return True
    if op is Op.GERMINATE:
        living, fossils = (
            sum(stage in LIVING for stage in stages),
            stages.count(S.FOSSILIZED),
        )
        busy = any(stage in (S.GERMINATED, S.TRAINING, *COOLDOWN) for stage in stages)
        room = living < env.max_seeds and living + fossils < (
            env.max_fossils or len(stages)
        )
        c = known.slots[place].site.place.channels
        hidden = max(8, c // 4)
        cost = FORMULAS[blueprint](c) + c * hidden + hidden + hidden + 1
        affordable = known.used + cost <= env.parameter_budget * 277
        return (
            stage is S.DORMANT
            and room
            and affordable
            and not (env.one_incubating and busy)
        )
    if op is Op.ADVANCE:
        gate = {S.GERMINATED: "G1", S.TRAINING: "G2", S.BLENDING: "G3"}.get(stage)
        return gate is not None and gate not in auto
    if op is Op.FOSSILIZE:
        return stage is S.HOLDING
    if op is Op.PRUNE:
        return (
            stage in LIVING
            and known.age[place] >= (env.min_prune_age or 1)
            and known.steady[place]
        )
    return stage in (S.BLENDING, S.HOLDING) and known.steady[place]


@contextmanager
def undone(world: Rig, index: int) -> Iterator[None]:
    """Restores the arrays, and the seeds of one host, after the block."""
    training, state = world.training(index), world.env.state
    arrays = [
        (values, values.copy())
        for holder in (state, state.slots)
        for values in holder.arrays().values()
    ]
    sites = [(site, dict(vars(site))) for site in training.sites]
    groups, shadows, count = (
        dict(training.seed_groups),
        dict(training.shadows),
        training.germinations,
    )
    yield
    for values, before in arrays:
        values[...] = before
    for site, attributes in sites:
        vars(site).update(attributes)
    training.seed_groups, training.shadows, training.germinations = (
        groups,
        shadows,
        count,
    )


def brute_force(world: Rig, index: int, planted: int) -> set[tuple[Op, bool]]:
    """Compares the mask with the rules for every (op, slot, blueprint) of one env, and executes what it allows.

    Only those with the blueprint ``planted`` are carried out: modules take time to make, and other ops name none.
    """
    spec, seen, known = world.env.action_spec, set(), Known(world, index)
    masks = {name: mask[index] for name, mask in world.info["action_mask"].items()}
    for op, place, b in itertools.product(
        Op, range(len(spec.slots)), range(len(spec.blueprints))
    ):
        row = np.array([op, place, b, b % 4, 0, 2, 0, 0])
        want = expected(known, op, place, spec.blueprints[b])
        seen.add((op, want))
        assert world.env.mask.legal(index, row) == want, (
            op.name,
            spec.slots[place],
            spec.blueprints[b],
        )
        joint = masks["op_slot"][op, place] and (
            op is not Op.GERMINATE or masks["slot_blueprint"][place, b]
        )
        assert joint == want
        if want:
            assert masks["op"][op]
            assert op is Op.WAIT or masks["slot"][place]
            assert op is not Op.GERMINATE or masks["blueprint"][b]
            if b != planted:
                continue
            state, actions = world.env.state, wait_actions(2)
            actions[index] = row
            with undone(world, index):
                world.env.loop._apply(actions, np.arange(2) == index)
                assert state.last_op[index] == op
                assert state.succeeded[index] or op in (Op.ADVANCE, Op.FOSSILIZE)
    for op in Op:
        assert masks["op"][op] == any(
            expected(known, op, place, name)
            for place in range(4)
            for name in spec.blueprints
        )
    assert all(
        masks[head].any() for head in HEADS
    )  # a mask without any True allows no action
    return seen


def leaning_forward(
    world: Rig, index: int, draw: np.random.Generator
) -> NDArray[np.int64]:
    """A random legal action that prefers advancing to pruning, so that late stages are reached."""
    masks = {name: mask[index] for name, mask in world.info["action_mask"].items()}
    weights = np.array([1.0, 3.0, 0.5, 0.2, 0.5, 6.0]) * masks["op"]
    row = np.array([draw.integers(size) for size in world.env.action_spec.sizes])
    row[0] = draw.choice(6, p=weights / weights.sum())
    row[1] = draw.choice(np.flatnonzero(masks["op_slot"][row[0]]))
    if row[0] == Op.GERMINATE:
        row[2] = draw.choice(np.flatnonzero(masks["slot_blueprint"][row[1]]))
        row[4:6] = (0, 2) if draw.random() < 0.7 else row[4:6]  # mostly quick and full
    return row


SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "several incubate": {"one_incubating": False, "max_seeds": 2},
    "automatic": {"auto_advance": ["G1", "G3"], "min_prune_age": 3},
    "poor": {
        "parameter_budget": 0.7,
        "one_incubating": False,
        "max_fossils": 2,
        "embargo": 3,
    },
}


@pytest.mark.parametrize("setting", slow_except(["several incubate"], SETTINGS))
def test_masks_are_exact_in_every_state_of_random_play(setting: str) -> None:
    with rig(n_envs=2, horizon=30, env=SETTINGS[setting]) as world:
        draw = np.random.default_rng(1)
        seen: set[tuple[Op, bool]] = set()
        for step in range(30):
            for index in range(2):
                seen |= brute_force(world, index, planted=step % len(FORMULAS))
            world.step(
                {index: leaning_forward(world, index, draw) for index in range(2)}
            )
            assert world.info["illegal_actions"].tolist() == [0, 0]
        assert seen >= {(op, legal) for op in Op for legal in (True, False)} - {
            (Op.WAIT, False)
        }


def test_a_forbidden_action_is_executed_as_wait_and_counted() -> None:
    """The env has the same bits as a twin that waits, whatever the forbidden action was."""
    with rig(n_envs=2, horizon=30) as world, rig(n_envs=2, horizon=30) as waiting:
        draw = np.random.default_rng(0)
        for each in (world, waiting):
            each.grow("r0c1", S.BLENDING)
        spec = world.env.action_spec
        for counted in range(1, 21):
            rows = [draw.integers(spec.sizes) for _ in range(40)]
            row = next((row for row in rows if not world.env.mask.legal(0, row)), None)
            assert row is not None
            world.step({0: row})
            waiting.step()
            assert world.info["illegal_actions"].tolist() == [counted, 0]
            np.testing.assert_array_equal(world.observation, waiting.observation)
            np.testing.assert_array_equal(world.rewards, waiting.rewards)
        world.reset()
        assert world.info["illegal_actions"].tolist() == [0, 0]


def test_masks_of_heads_are_joined_as_other_libraries_read_them() -> None:
    with rig(n_envs=2) as world:
        flat, heads = world.env.action_masks(), world.info["action_mask"]
        assert flat.dtype == np.bool_
        place = 0
        for name, size in zip(
            (
                "op",
                "slot",
                "blueprint",
                "style",
                "tempo",
                "alpha_target",
                "alpha_speed",
                "alpha_curve",
            ),
            (6, 4, len(FORMULAS), 4, 3, 3, 4, 5),
            strict=True,
        ):
            assert np.array_equal(flat[:, place : place + size], heads[name])
            place += size
        assert place == flat.shape[1]
        assert heads["op"].tolist() == [[True, True, False, False, False, False]] * 2


def test_the_mask_in_info_is_that_of_the_state_in_the_observation() -> None:
    with rig() as world:
        world.do("GERMINATE", "r1c0", "norm")
        legal = world.info["action_mask"]["op_slot"][0]
        place = world.env.action_spec.slots.index("r1c0")
        assert world.value("r1c0/stage_germinated") == 1
        assert [op.name for op in Op if legal[op, place]] == [
            "WAIT",
            "PRUNE",
            "ADVANCE",
        ]
        assert not legal[Op.GERMINATE].any()
