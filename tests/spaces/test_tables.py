"""The tables of the seam: actions, masks, observation layout."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.spaces.action import HEADS, RELEVANT, ActionSpec, Op
from esper.spaces.mask import ActionMask
from esper.spaces.observation import BASE, LIMIT, PER_SLOT, FeatureKind, ObservationLayout, clamp_pp, symlog
from tests.spaces.spaces_helpers import Action, one_observation

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
    assert HEADS == ("op", "slot", "blueprint", "style", "tempo", "alpha_target", "alpha_speed", "alpha_curve")
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


def test_encode_keeps_the_heads_that_matter_and_zeroes_the_others() -> None:
    everything = {
        "style": "GATED_GATE",
        "tempo": 8,
        "alpha_target": 0.7,
        "alpha_speed": 5,
        "alpha_curve": "logistic_24",
    }
    rows = {op: SPEC.encode(op, "r1c0", "conv_light", **everything).tolist() for op in Op}  # type: ignore[arg-type]
    assert rows == {
        Op.WAIT: [0, 0, 0, 0, 0, 0, 0, 0],
        Op.GERMINATE: [1, 2, 1, 3, 2, 1, 0, 0],
        Op.SET_ALPHA_TARGET: [2, 2, 0, 0, 0, 1, 2, 4],
        Op.PRUNE: [3, 2, 0, 0, 0, 0, 2, 4],
        Op.FOSSILIZE: [4, 2, 0, 0, 0, 0, 0, 0],
        Op.ADVANCE: [5, 2, 0, 0, 0, 0, 0, 0],
    }
    decoded = Action.decode(np.array(rows[Op.GERMINATE]))
    assert (decoded.op, decoded.slot, decoded.blueprint, decoded.style, decoded.tempo, decoded.alpha_target) == (
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
def test_a_value_that_no_head_has_is_an_error_with_the_choices(heads: dict[str, object], message: str) -> None:
    given = {"slot": "r0c0", "blueprint": "norm", **heads}
    with pytest.raises(ValueError, match=r"is not one of|choose one of") as caught:
        SPEC.encode(Op.GERMINATE, **given)  # type: ignore[arg-type]
    assert message in str(caught.value)


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
    legal = {(op, slot) for op in range(1, 6) for slot in range(3) if table.legal(0, np.array([op, slot, *[0] * 6]))}
    assert legal == {(1, 0), (5, 1)}
    heads = table.heads(SPEC)
    assert heads["slot"].tolist() == [[True, True, False]]
    assert set(heads) == {*HEADS, "op_slot", "slot_blueprint"}


def test_germinate_needs_a_slot_that_can_afford_something() -> None:
    assert not mask([(1, 0)], poor=(0, 1, 2)).op[0, Op.GERMINATE]


def layout() -> ObservationLayout:
    return ObservationLayout(("r0c0", "r0c1"), 30)


def test_the_layout_names_every_place_once() -> None:
    names = [entry.name for entry in layout().entries]
    assert len(names) == len(set(names)) == layout().size == len(BASE) + 2 * len(PER_SLOT)
    assert all(entry.meaning and isinstance(entry.kind, FeatureKind) for entry in layout().entries)
    assert [layout().index[name] for name in names] == list(range(len(names)))


@pytest.mark.trap(23)
def test_all_that_the_reward_depends_on_is_observed() -> None:
    names = {entry.name for entry in layout().entries}
    assert names >= {
        "committed_accuracy",
        "all_off_accuracy",
        "baseline_accuracy",
        "baseline_next",
        "loss_lead",
        "committed_loss_lead",
        "all_off_loss_lead",
        "baseline_loss_next",
        "rollbacks",
        "anomaly_pending",
        "potential",
        "host_parameters",
        "added_parameters",
        "fossil_parameters",
        "rent",
        "seeds_left",
        "epoch",
        "r0c0/epochs_in_stage",
        "r0c1/contribution_error",
    }


anything = st.floats(allow_nan=True, allow_infinity=True)


@settings(deadline=None)
@given(st.data())
def test_an_observation_is_finite_whatever_its_values_and_reads_back(data: st.DataObject) -> None:
    seen = layout()
    base = {entry.name: data.draw(anything) for entry in BASE[:6]} | {entry.name: 0.5 for entry in BASE[6:]}
    slots = {slot: {entry.name: data.draw(anything) for entry in PER_SLOT[:3]} for slot in seen.slots}
    for values in slots.values():
        values.update({entry.name: -3.0 for entry in PER_SLOT[3:]})
    vector = one_observation(seen, base, slots)
    assert vector.dtype == np.float32
    assert vector.shape == (seen.size,)
    assert np.isfinite(vector).all()
    assert np.abs(vector).max() <= LIMIT
    for name, value in [*base.items(), *((f"{slot}/{n}", v) for slot in slots for n, v in slots[slot].items())]:
        want = 0.0 if math.isnan(value) else max(-LIMIT, min(LIMIT, value))
        assert float(seen.read(vector, name)) == pytest.approx(want, rel=1e-6, abs=1e-30)


def test_a_value_that_is_missing_or_unknown_is_an_error() -> None:
    seen = layout()
    with pytest.raises(KeyError):
        one_observation(seen, {}, {})
    with pytest.raises(KeyError):
        seen.read(np.zeros(seen.size, dtype=np.float32), "accuracy of tomorrow")


@settings(deadline=None)
@given(st.floats(-1e30, 1e30))
def test_symlog_is_odd_and_tames(x: float) -> None:
    assert symlog(-x) == -symlog(x)
    assert abs(symlog(x)) <= abs(x)
    assert abs(symlog(x)) < 70


def test_symlog_and_clamp_by_hand() -> None:
    assert symlog(math.e - 1) == pytest.approx(1.0)
    assert symlog(-(math.e**2 - 1)) == pytest.approx(-2.0)
    assert [clamp_pp(x) for x in (None, 0.0, 5.0, -12.0, 40.0)] == [0.0, 0.0, 0.5, -1.0, 1.0]
