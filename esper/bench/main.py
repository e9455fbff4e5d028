"""The entry point of the `esper-bench` command, which answers signals while the command is imported."""

from __future__ import annotations

from esper.run.interrupt import interrupts_end


def main() -> None:
    """Runs the command; exits as ``esper`` does."""
    with interrupts_end():
        from esper.bench.command import command  # takes a second
    command()
