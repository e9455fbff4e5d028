"""Heads, their choices, and encoding actions."""

from typing import Any

import numpy as np
import pytest
import torch

from esper.core.action import (
    HEADS,
    RELEVANT,
    ActionSpec,
    Op,
    integers_of,
    nearest_tempo,
)
from tests.core.spaces_helpers import Action

SPEC = ActionSpec(("r0c0", "r0c1", "r1c0"), ("norm", "conv_light"))


def test_ops_and_heads_have_the_values_and_the_order_of_the_seam() -> None:
    assert [(op.name, int(op)) for op in Op] == [
        ("WAIT", 0),
        ("GERMINATE", 1),
        ("SET_ALPHA_TARGET", 2),
        ("PRUNE", 3),
        ("FOSSILIZE", 4),
        ("ADVANCE", 5),
    ]
    assert HEADS == (
        "op",
        "slot",
        "blueprint",
        "style",
        "tempo",
        "alpha_target",
        "alpha_speed",
        "alpha_curve",
    )
    assert SPEC.sizes == (6, 3, 2, 4, 3, 3, 4, 5)
    assert SPEC.choices("tempo") == (3, 5, 8)
    assert SPEC.choices("alpha_target") == (0.5, 0.7, 1.0)
    assert SPEC.choices("alpha_speed") == (0, 3, 5, 8)
    assert {op.name: set(heads) for op, heads in RELEVANT.items()} == {
        "WAIT": set(),
        "GERMINATE": {"slot", "blueprint", "style", "tempo", "alpha_target"},
        "SET_ALPHA_TARGET": {"slot", "alpha_target", "alpha_speed", "alpha_curve"},
        "PRUNE": {"slot", "alpha_speed", "alpha_curve"},
        "FOSSILIZE": {"slot"},
        "ADVANCE": {"slot"},
    }


def test_a_blueprint_that_does_not_fit_the_slot_is_refused_with_those_that_do() -> None:
    spec = ActionSpec(
        ("r0c0", "r2c0"), ("norm", "widen_half"), (("norm",), ("widen_half",))
    )
    assert spec.encode(Op.GERMINATE, "r2c0", "widen_half").tolist()[:3] == [1, 1, 1]
    assert spec.encode(Op.PRUNE, "r2c0", "norm").tolist()[:3] == [3, 1, 0]
    with pytest.raises(
        ValueError, match="'norm' does not fit in slot r2c0, where these do: widen_half"
    ):
        spec.encode(Op.GERMINATE, "r2c0", "norm")


def test_encode_keeps_the_heads_that_matter_and_zeroes_the_others() -> None:
    everything = {
        "style": "GATED_GATE",
        "tempo": 8,
        "alpha_target": 0.7,
        "alpha_speed": 5,
        "alpha_curve": "logistic_24",
    }
    rows = {
        op: SPEC.encode(op, "r1c0", "conv_light", **everything).tolist() for op in Op
    }  # type: ignore[arg-type]
    assert rows == {
        Op.WAIT: [0, 0, 0, 0, 0, 0, 0, 0],
        Op.GERMINATE: [1, 2, 1, 3, 2, 1, 0, 0],
        Op.SET_ALPHA_TARGET: [2, 2, 0, 0, 0, 1, 2, 4],
        Op.PRUNE: [3, 2, 0, 0, 0, 0, 2, 4],
        Op.FOSSILIZE: [4, 2, 0, 0, 0, 0, 0, 0],
        Op.ADVANCE: [5, 2, 0, 0, 0, 0, 0, 0],
    }
    decoded = Action.decode(np.array(rows[Op.GERMINATE]))
    assert (
        decoded.op,
        decoded.slot,
        decoded.blueprint,
        decoded.style,
        decoded.tempo,
        decoded.alpha_target,
    ) == (
        Op.GERMINATE,
        2,
        1,
        "GATED_GATE",
        8,
        0.7,
    )


@pytest.mark.finding("H6")
@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ({"slot": "r9c9"}, "r0c0, r0c1, r1c0"),
        ({"blueprint": "lora"}, "norm, conv_light"),
        ({"style": "CUBIC"}, "LINEAR_ADD"),
        ({"tempo": 4}, "3, 5, 8"),
        ({"alpha_target": 0.6}, "0.5, 0.7, 1.0"),
        ({"slot": None}, "r0c0"),
    ],
)
def test_a_value_that_no_head_has_is_an_error_with_the_choices(
    heads: dict[str, object], message: str
) -> None:
    given = {"slot": "r0c0", "blueprint": "norm", **heads}
    with pytest.raises(ValueError, match=r"is not one of|choose one of") as caught:
        SPEC.encode(Op.GERMINATE, **given)  # type: ignore[arg-type]
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("epochs", "tempo"), [(0.5, 3), (4.0, 3), (4.1, 5), (6.5, 5), (7.0, 8), (100.0, 8)]
)
def test_the_nearest_tempo_is_the_shorter_of_two(epochs: float, tempo: int) -> None:
    assert nearest_tempo(epochs) == tempo


@pytest.mark.parametrize(
    "actions",
    [
        [[1, 2]],
        (np.array([1, 2]),),
        (torch.tensor([1, 2]),),
        [[np.uint8(1), np.int16(2)]],
        np.array([[1, 2]], dtype=np.uint64),
        torch.tensor([[1, 2]], dtype=torch.int32),
        torch.ones(1, 2, dtype=torch.int64).cumsum(1),
    ],
)
def test_integers_are_taken_from_arrays_lists_and_tensors(actions: Any) -> None:
    indices = integers_of(actions)
    assert indices.dtype == np.int64
    assert indices.tolist() == [[1, 2]]


@pytest.mark.parametrize(
    "wrong",
    [
        0.0,
        True,
        None,
        "0",
        {"op": 0},
        [0, 0.5],
        [np.float32(1)],
        [[0, 0], [0]],
        10**30,
        np.array([2**63], dtype=np.uint64),
        np.array([np.nan]),
        np.array([0j]),
        np.array([0], dtype=object),
        np.array([True]),
        torch.tensor([0.0], requires_grad=True),
        torch.tensor([0.0], dtype=torch.bfloat16),
        torch.tensor([False]),
        [torch.tensor([0.5])],
    ],
    ids=str,
)
def test_what_is_no_integer_is_refused_and_not_rounded(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"must be .*integers"):
        integers_of(wrong)


def test_encode_refuses_an_op_that_is_none() -> None:
    for wrong in ("WAIT", 6, None):
        with pytest.raises(ValueError, match=r"is not one of: Op\.WAIT, Op\.GERMINATE"):
            SPEC.encode(wrong)  # type: ignore[arg-type]
