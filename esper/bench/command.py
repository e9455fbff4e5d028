"""The `esper-bench` command."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, get_args

import click

from esper.bench import CASES
from esper.config.given import COUNT, FILE, FiniteRange
from esper.config.task import Optimizer, Precision
from esper.data.names import require_task
from esper.telemetry.text import on_terminal

# Console width without a terminal, so that no cell wraps.
WIDE = 200

SIZE_HELP = "Size to measure, such as 4x128x8; the numbers depend on the case. Can be repeated."
TASK_HELP = "Of train-task, grow-task and workers: a task, or path.py:function."
SECONDS_HELP = "Stop a comparison after this time, once each side has had three turns."
DEVICE = click.Choice(["auto", "cpu", "cuda"])


class InvalidInput(click.ClickException):
    """Ends the command as other commands of Esper do for input that cannot be used."""

    exit_code = 2


def _known(context: click.Context, parameter: click.Parameter, cases: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the names of cases, all of them without names."""
    for case in cases:
        if case not in CASES:
            raise click.BadParameter(f"{case!r} is not a case; known: {', '.join(sorted(CASES))}")
    return cases


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("cases", nargs=-1, callback=_known)
@click.option("--size", "sizes", multiple=True, metavar="NxK", help=SIZE_HELP)
@click.option("--task", default="digits", show_default=True, help=TASK_HELP)
@click.option("--optimizer", type=click.Choice(get_args(Optimizer)), help="Of the same: instead of the task's own.")
@click.option("--precision", type=click.Choice(get_args(Precision)), help="Of the same: of both sides.")
@click.option("--quick", is_flag=True, help="Do only enough work to show that a case runs; ignore the ratios then.")
@click.option("--device", type=DEVICE, default="auto", help="auto: all available devices.")
@click.option("--threads", default=1, type=click.IntRange(1, 1024), help="Per operator; bars are defined for one.")
@click.option("--rounds", default=15, show_default=True, type=COUNT, help="Max turns of each side.")
@click.option("--seconds", default=60.0, show_default=True, type=FiniteRange(min=0), help=SECONDS_HELP)
@click.option("--json", "json_file", type=FILE, help="Also write the results as a JSON list.")
@click.option("--markdown", "markdown_file", type=FILE, help="Also write a Markdown page.")
def command(
    cases: tuple[str, ...],
    sizes: tuple[str, ...],
    device: str,
    threads: int,
    json_file: Path | None,
    markdown_file: Path | None,
    **effort: Any,
) -> None:
    """Measure CASES against their baselines, taking alternate turns in this process.

    The cases are adamw, cross-entropy, grad-stats, norm-relu-pool, sgd and stage-batch (operators), and
    grow-task, train-epoch, train-task, validate and workers (hosts); all of them take about 20 minutes on two cores.

    A ratio above 1 means that Esper is better; a bar is the ratio that it has to reach.
    """
    import torch
    from rich.console import Console

    from esper.bench import session, table
    from esper.bench.case import BenchArgs, parse_size
    from esper.bench.runner import Result
    from esper.config import ConfigError
    from esper.files.system_info import summary_lines
    from esper.telemetry.text import print_anywhere

    print_anywhere()
    for file in (json_file, markdown_file):
        if file is None:
            continue
        is_device = file.exists() and not file.is_file()
        if is_device or not os.access(file.absolute().parent, os.W_OK):
            raise InvalidInput(f"{file}: give a file in an existing folder that you can write to")
    try:
        require_task(effort["task"])
        args = BenchArgs(
            sizes=tuple(map(parse_size, sizes)),
            devices=session.devices(device),
            **effort,
        )
        loaded = session.load(cases, args)
        torch.set_num_threads(threads)
        console = Console(width=None if on_terminal() else WIDE)
        heading = [*summary_lines(paths=False), f"Threads inside an operator: {threads}"]
        console.print("\n".join(heading), highlight=False)
        results: list[Result] = []
        session.save(results, heading, json_file, markdown_file)  # also without results
        for result in session.measured(loaded, args, bool(cases), console):
            results.append(result)
            session.save(results, heading, json_file, markdown_file)  # so that an interrupt loses none
    except ConfigError as error:
        raise InvalidInput(str(error)) from error
    except OSError as error:
        if error.filename is None:
            raise
        raise click.ClickException(f"{error.filename}: {error.strerror}") from error
    table.print_results(results, console)
