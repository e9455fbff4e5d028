"""Legal actions of slots and blueprints."""

from typing import Any

import numpy as np
import pytest

from esper.core.action import HEADS, ActionSpec, Op
from esper.core.mask import ActionMask

SPEC = ActionSpec(("r0c0", "r0c1", "r1c0"), ("norm", "conv_light"))


def mask(op_slot: list[tuple[int, int]], poor: tuple[int, ...] = ()) -> ActionMask:
    table = np.zeros((1, 6, 3), dtype=np.bool_)
    for op, slot in op_slot:
        table[0, op, slot] = True
    affordable = np.ones((1, 3, 2), dtype=np.bool_)
    affordable[0, list(poor)] = False
    return ActionMask.build(table, affordable)


def test_wait_is_always_legal_and_alone_when_nothing_else_is() -> None:
    nothing = mask([])
    heads = nothing.heads(SPEC)
    assert heads["op"].tolist() == [[True, False, False, False, False, False]]
    assert all(heads[name].any() for name in HEADS)
    for slot in range(3):
        assert nothing.legal(0, np.array([0, slot, 1, 2, 1, 1, 1, 1]))
        assert not nothing.legal(0, np.array([5, slot, 0, 0, 0, 0, 0, 0]))


def test_the_mask_is_joint_in_op_slot_and_blueprint() -> None:
    table = mask([(1, 0), (1, 2), (5, 1)], poor=(2,))
    assert table.op.tolist() == [[True, True, False, False, False, True]]
    legal = {
        (op, slot)
        for op in range(1, 6)
        for slot in range(3)
        if table.legal(0, np.array([op, slot, *[0] * 6]))
    }
    assert legal == {(1, 0), (5, 1)}
    heads = table.heads(SPEC)
    assert heads["slot"].tolist() == [[True, True, False]]
    assert set(heads) == {*HEADS, "op_slot", "slot_blueprint"}


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        ((Op.FOSSILIZE, "r0c0"), "FOSSILIZE was legal in no slot"),
        ((Op.PRUNE, "r0c0"), "PRUNE was not legal in r0c0"),
        ((Op.GERMINATE, "r1c0", "norm"), "norm could not be planted in r1c0"),
    ],
)
def test_the_first_reason_of_an_illegal_action_is_named(
    action: tuple[Any, ...], reason: str
) -> None:
    table = mask([(1, 0), (1, 2), (int(Op.PRUNE), 1)])
    table.slot_blueprint[0, 2, 0] = False
    row = SPEC.encode(*action)
    assert not table.legal(0, row)
    assert table.why_illegal(SPEC, 0, row) == reason


def test_germinate_needs_a_slot_that_can_afford_something() -> None:
    assert not mask([(1, 0)], poor=(0, 1, 2)).op[0, Op.GERMINATE]
