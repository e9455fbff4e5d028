"""The entry point of `esper-bench`."""

from __future__ import annotations

import signal

import pytest

from tests.interrupted import SIGNALS, interrupted


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("module", ["esper.bench.command", "click"])
def test_a_signal_while_the_command_is_imported_ends_it_with_a_word(
    module: str, number: signal.Signals
) -> None:
    assert interrupted("esper.bench", module, number) == (130, "Interrupted.\n")
