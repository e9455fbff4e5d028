"""The command answers signals from its first line on, and before it has imported anything."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.interrupted import SIGNALS, interrupted


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("module", ["esper.cli.group", "click"])
def test_a_signal_while_the_command_is_imported_ends_it_with_a_word(
    module: str, number: signal.Signals
) -> None:
    assert interrupted("esper.cli", module, number) == (130, "Interrupted.\n")


def test_a_launcher_sees_which_ranks_it_has_ended() -> None:
    assert interrupted("esper.cli", "click", signal.SIGTERM, RANK="1") == (
        -signal.SIGTERM,
        "",
    )


def test_the_entry_points_import_nothing_that_takes_time() -> None:
    code = "import esper.cli.main, esper.bench.main, sys; print({'click', 'numpy'} & {*sys.modules})"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert found.stdout == "set()\n"
