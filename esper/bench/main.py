"""The `esper-bench` command."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import click

from esper.bench import CASES
from esper.config.task import Optimizer, Precision

if TYPE_CHECKING:
    from esper.bench.runner import Result

# Console width without a terminal, so that no cell wraps.
WIDE = 200

SIZE_HELP = "Size to measure, such as 4x128x8; the numbers depend on the case. Can be repeated."
SECONDS_HELP = "Stop a comparison after this time, once each side has had three turns."
DEVICE = click.Choice(["auto", "cpu", "cuda"])
FILE = click.Path(path_type=Path)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("cases", nargs=-1, type=click.Choice(sorted(CASES)))
@click.option("--size", "sizes", multiple=True, metavar="NxK", help=SIZE_HELP)
@click.option("--sweep", is_flag=True, help="Measure all sizes of train-epoch, not only the first few.")
@click.option("--task", default="digits", show_default=True, help="train-task: a task, or path.py:function.")
@click.option("--optimizer", type=click.Choice(get_args(Optimizer)), help="train-task: instead of the task's own.")
@click.option("--precision", type=click.Choice(get_args(Precision)), help="train-task: of both sides.")
@click.option("--quick", is_flag=True, help="Do only enough work to show that a case runs; ignore the ratios then.")
@click.option("--device", type=DEVICE, default="auto", help="auto: all available devices.")
@click.option("--threads", default=1, show_default=True, help="Threads per operator; bars are defined for one.")
@click.option("--rounds", default=15, show_default=True, type=click.IntRange(min=1), help="Max turns of each side.")
@click.option("--seconds", default=60.0, show_default=True, type=click.FloatRange(min=0), help=SECONDS_HELP)
@click.option("--json", "json_file", type=FILE, help="Also write the results as a JSON list.")
@click.option("--markdown", "markdown_file", type=FILE, help="Also write a Markdown page.")
@click.option("--profile", "trace_file", type=FILE, help="Also write a trace of one turn of Esper's side of each case.")
def main(
    cases: tuple[str, ...],
    sizes: tuple[str, ...],
    sweep: bool,
    task: str,
    optimizer: Optimizer | None,
    precision: Precision | None,
    quick: bool,
    device: str,
    threads: int,
    rounds: int,
    seconds: float,
    json_file: Path | None,
    markdown_file: Path | None,
    trace_file: Path | None,
) -> None:
    """Measure CASES (all by default) against their baselines, taking alternate turns in this process.

    A ratio above 1 means that Esper is better; a bar is the ratio that it has to reach.
    """
    import json
    from dataclasses import asdict

    import torch
    from rich.console import Console

    from esper.bench import session, table
    from esper.bench.case import BenchArgs, parse_size
    from esper.config import ConfigError
    from esper.files.system_info import summary_lines
    from esper.telemetry.text import print_anywhere

    print_anywhere()

    def save(results: list[Result]) -> None:
        if json_file is not None:
            rows = [asdict(result) for result in results]
            json_file.write_text(json.dumps(rows, indent=2) + "\n")
        if markdown_file is not None:
            markdown_file.write_text(table.markdown(results, heading))

    try:
        for file in (json_file, markdown_file, trace_file):
            if file is not None and not os.access(file.absolute().parent, os.W_OK):
                raise ConfigError(f"{file}: give a file in an existing folder that you can write to")
        args = BenchArgs(
            sizes=tuple(map(parse_size, sizes)),
            devices=session.devices(device),
            sweep=sweep,
            quick=quick,
            rounds=rounds,
            task=task,
            optimizer=optimizer,
            precision=precision,
            seconds=seconds,
        )
        modules = session.load(cases, args)
        torch.set_num_threads(threads)
        console = Console(width=None if sys.stdout.isatty() else WIDE)
        heading = [*summary_lines(paths=False), f"Threads inside an operator: {torch.get_num_threads()}"]
        console.print("\n".join(heading), highlight=False)
        expected = session.estimate(modules, args)
        if expected:
            console.print(expected, highlight=False)
        results = session.measure_all(modules, args, bool(cases), console, save)
    except ConfigError as error:
        raise click.ClickException(str(error)) from error
    save(results)  # also if there are none
    table.print_results(results, console)
    if trace_file is not None:
        measured = [module for case, module in modules.items() if _has_result(case, results)]
        session.trace_all(measured, args, trace_file)


def _has_result(case: str, results: list[Result]) -> bool:
    return any(result.case.startswith(case) for result in results)
