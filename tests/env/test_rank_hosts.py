"""Tables of env states that rank 0 and the other ranks exchange."""

from __future__ import annotations

import numpy as np

from esper.core.slots import Slots
from esper.core.state import EnvState, table_of, write_changes, write_table

ROWS = slice(1, 4)


def empty(envs: int = 5) -> EnvState:
    return EnvState.fresh(envs, slots=Slots.fresh(envs, 2))


def full() -> EnvState:
    """Five envs with two slots, with all kinds of values."""
    dice, state = np.random.default_rng(0), empty()
    for values in (*state.arrays().values(), *state.slots.arrays().values()):
        if values.dtype.kind == "f":
            values[...] = dice.standard_normal(values.shape)
            values[1], values[2], values[3] = np.nan, -0.0, np.inf
        else:
            values[...] = dice.integers(
                0, 2 if values.dtype.kind == "b" else 2**50, values.shape
            )
    return state


def bits(state: EnvState, rows: slice) -> dict[str, bytes]:
    arrays = {
        **state.arrays(),
        **{f"slots {name}": values for name, values in state.slots.arrays().items()},
    }
    return {name: values[rows].tobytes() for name, values in arrays.items()}


def test_a_table_has_every_bit_of_its_envs_and_nothing_of_others() -> None:
    state, other = full(), empty()
    write_table(other, ROWS, table_of(state, ROWS))
    assert bits(other, ROWS) == bits(state, ROWS)
    for rest in (slice(0, 1), slice(4, 5)):
        assert bits(other, rest) == bits(empty(), rest)


def test_only_what_differs_between_two_tables_is_written() -> None:
    state, there = full(), empty(3)
    sent = table_of(state, ROWS)
    write_table(there, slice(0, 3), sent)
    there.loss[0], there.slots.alpha[2, 0], there.rolled_back[1] = (
        3.5,
        -0.0,
        ~there.rolled_back[1],
    )
    state.epoch += 1  # meanwhile
    before = bits(state, slice(None))
    write_changes(state, ROWS, sent, table_of(there, slice(0, 3)))
    after = bits(state, slice(None))
    assert {name for name in after if after[name] != before[name]} == {
        "loss",
        "slots alpha",
        "rolled_back",
    }
    assert state.loss[1] == 3.5
    assert np.signbit(state.slots.alpha[3, 0])
    assert state.rolled_back[2] == there.rolled_back[1]
