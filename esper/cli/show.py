"""`esper show`: status of a run."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("show")
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--watch", "watching", is_flag=True, help="Keep showing it until the run ends; Ctrl-C stops only the view."
)
def command(run: Path, watching: bool) -> None:
    """Show the status of a run: progress, accuracy, verdict, slots, agent, time and latest events.

    RUN is the folder of a run that is in progress, finished or interrupted, or that of a comparison, whose tables are
    shown as far as they go.
    """
    from esper.show.read import is_comparison, open_run, saved_tables

    if is_comparison(run):
        click.echo(saved_tables(run))
        return
    from esper.show.live import show, watch

    opened = open_run(run)
    if watching:
        watch(opened)
    else:
        show(opened)
