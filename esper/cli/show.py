"""`esper show`: how a run stands."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("show")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--watch", "watching", is_flag=True, help="Go on showing it until it ends; Ctrl-C ends only the view.")
def command(run: Path, watching: bool) -> None:
    """Show how a run stands: how far it is, accuracy, verdict, slots, policy, time, what happened last.

    RUN is the folder of a run that is going on, has ended, or was interrupted.
    """
    from esper.report.read import open_run
    from esper.report.watch import show, watch

    found = open_run(run)
    if watching:
        watch(found)
    else:
        show(found)
