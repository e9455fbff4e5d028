"""`esper report`: one HTML page about one or more runs."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("report")
@click.argument("runs", nargs=-1, required=True, metavar="RUN [RUN...]", type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(path_type=Path),
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
