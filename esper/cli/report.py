"""`esper report`, an HTML page about runs, and `esper show`, the status of a run."""

from __future__ import annotations

from pathlib import Path

import click

from esper.config.given import PATH


@click.command("report")
@click.argument("runs", nargs=-1, required=True, metavar="RUN [RUN...]", type=PATH)
@click.option(
    "--out",
    type=PATH,
    metavar="FILE.html",
    help="File to write.  [default: RUN/report.html; for several runs, ./report.html]",
)
def command(runs: tuple[Path, ...], out: Path | None) -> None:
    """Write an HTML page about a run or a comparison; several runs are shown side by side.

    The page needs no network and contains no script. A run may be in progress, interrupted or damaged: the page says
    so.
    """
    from esper.show.page import write_report

    path = write_report(runs, out)
    click.echo(f"{path} ({path.stat().st_size / 1e6:.1f} MB); open it in a browser")


@click.command("show")
@click.argument("run", type=PATH)
def show(run: Path) -> None:
    """Show the status of a run: its progress, the lines that it has printed, and the verdict.

    RUN is the folder of a run that is in progress, finished or interrupted, or that of a comparison, of which the
    tables written so far are shown. `watch esper show RUN` keeps showing it.
    """
    from esper.show.read import is_comparison, open_run, saved_tables

    if is_comparison(run):
        click.echo(saved_tables(run))
        return
    from esper.show.live import short_form

    click.echo(short_form(open_run(run)))
