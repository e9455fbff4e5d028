"""`esper report`: runs as one page of HTML."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("report")
@click.argument("runs", nargs=-1, required=True, metavar="RUN [RUN...]", type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FILE.html",
    help="Where to write it.  [default: RUN/report.html; of several runs, ./report.html]",
)
def command(runs: tuple[Path, ...], out: Path | None) -> None:
    """Write what run folders hold as one page of HTML; of several runs, side by side.

    The page needs no network and runs no script. A run may be going on, interrupted or damaged: the page says so.
    """
    from esper.report.page import write_report

    path = write_report(runs, out)
    click.echo(f"{path} ({path.stat().st_size / 1e6:.1f} MB); open it in a browser")
