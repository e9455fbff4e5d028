"""The entry point of the `esper` command, which answers signals from its first line on."""

from __future__ import annotations

import os
from contextlib import nullcontext

from esper.run.interrupt import interrupts_end, termination_interrupts


def main() -> None:
    """Runs the command and exits with one of ``EXIT_CODES`` of ``esper.cli.group``."""
    with interrupts_end():
        from esper.cli.group import run  # takes a second
    # A launcher ends a rank by SIGTERM, also while it waits outside of Python for others.
    with nullcontext() if "RANK" in os.environ else termination_interrupts():
        run()


if __name__ == "__main__":
    main()
