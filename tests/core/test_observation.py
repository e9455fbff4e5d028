"""The layout of the observation, and how values are squeezed into it."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.core.observation import (
    BASE,
    LIMIT,
    PER_CHOICE,
    PER_SLOT,
    FeatureKind,
    ObservationLayout,
    clamp_pp,
    symlog,
)
from tests.core.spaces_helpers import one_observation


def layout() -> ObservationLayout:
    return ObservationLayout(("r0c0", "r0c1"), ("oak", "ivy", "elm"), 30)


def test_the_layout_names_every_place_once() -> None:
    names = [entry.name for entry in layout().entries]
    assert (
        len(names)
        == len(set(names))
        == layout().size
        == len(BASE) + 2 * len(PER_SLOT) + 6 * len(PER_CHOICE)
    )
    assert all(
        entry.meaning and isinstance(entry.kind, FeatureKind)
        for entry in layout().entries
    )
    assert [layout().index[name] for name in names] == list(range(len(names)))


@pytest.mark.trap(23)
def test_all_that_the_reward_depends_on_but_hosts_left_alone_is_observed() -> None:
    names = {entry.name for entry in layout().entries}
    assert names >= {
        "committed_accuracy",
        "committed_loss",
        "all_off_accuracy",
        "all_off_loss",
        "rollbacks",
        "anomaly_pending",
        "first_parameters",
        "added_parameters",
        "fossil_parameters",
        "rent",
        "seeds_left",
        "epoch",
        "r0c0/epochs_in_stage",
        "r0c1/contribution_error",
    }


def test_nothing_of_hosts_left_alone_is_observed() -> None:
    """A model in a user's loop has none, and their next epochs are its future."""
    names = [entry.name for entry in layout().entries]
    assert not [name for name in names if "baseline" in name or "lead" in name]


anything = st.floats(allow_nan=True, allow_infinity=True)


@settings(deadline=None)
@given(st.data())
def test_an_observation_is_finite_whatever_its_values_and_reads_back(
    data: st.DataObject,
) -> None:
    seen = layout()
    base = {entry.name: data.draw(anything) for entry in BASE[:6]} | {
        entry.name: 0.5 for entry in BASE[6:]
    }
    slots = {
        slot: {entry.name: data.draw(anything) for entry in PER_SLOT[:3]}
        for slot in seen.slots
    }
    for values in slots.values():
        values.update({entry.name: -3.0 for entry in PER_SLOT[3:]})
    vector = one_observation(seen, base, slots)
    assert vector.dtype == np.float32
    assert vector.shape == (seen.size,)
    assert np.isfinite(vector).all()
    assert np.abs(vector).max() <= LIMIT
    for name, value in [
        *base.items(),
        *((f"{slot}/{n}", v) for slot in slots for n, v in slots[slot].items()),
    ]:
        want = 0.0 if math.isnan(value) else max(-LIMIT, min(LIMIT, value))
        assert float(seen.read(vector, name)) == pytest.approx(
            want, rel=1e-6, abs=1e-30
        )


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
    assert [clamp_pp(x) for x in (None, 0.0, 5.0, -12.0, 40.0)] == [
        0.0,
        0.0,
        0.5,
        -1.0,
        1.0,
    ]
