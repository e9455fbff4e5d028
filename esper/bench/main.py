"""The `esper-bench` command. A case is one file in this folder and one entry in `OPERATORS` or `RUNS`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from rich.console import Console

    from esper.bench.request import BenchArgs
    from esper.bench.runner import Result

# Command -> module with NAME, SIZE and comparisons(request). Imported only when it runs: --help must not load torch.
OPERATORS = {
    "cross-entropy": "esper.bench.cross_entropy",
    "grad-stats": "esper.bench.grad_stats",
    "norm-relu-pool": "esper.bench.norm_relu_pool",
    "sgd": "esper.bench.sgd",
    "stage-batch": "esper.bench.stage_batch",
}
RUNS = {
    "end-to-end": "esper.bench.end_to_end",
    "env-step": "esper.bench.env_step",
    "ppo-update": "esper.bench.ppo_update",
    "telemetry-overhead": "esper.bench.telemetry_overhead",
    "train-epoch": "esper.bench.train_epoch",
    "validate": "esper.bench.validate",
}
CASES = OPERATORS | RUNS

# Console width without a terminal, so that no cell wraps.
WIDE = 200

SIZE_HELP = "Size to measure, such as 4x128x8; the numbers depend on the case. Can be repeated."


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("cases", nargs=-1, type=click.Choice(sorted(CASES)))
@click.option("--size", "sizes", multiple=True, metavar="NxK", help=SIZE_HELP)
@click.option("--sweep", is_flag=True, help="Measure all sizes of train-epoch, not only the first few.")
@click.option("--quick", is_flag=True, help="Do only enough work to show that a case runs; ignore the ratios then.")
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="auto: all available devices."
)
@click.option("--threads", default=1, show_default=True, help="Threads per operator; bars are defined for one.")
@click.option("--rounds", default=15, show_default=True, type=click.IntRange(min=1), help="Max turns of each side.")
@click.option(
    "--seconds",
    default=60.0,
    show_default=True,
    type=click.FloatRange(min=0),
    help="Stop a comparison after this time, once each side has had three turns.",
)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the results as a JSON list.")
@click.option("--markdown", "markdown_file", type=click.Path(path_type=Path), help="Also write a Markdown page.")
@click.option(
    "--profile",
    "trace_file",
    type=click.Path(path_type=Path),
    help="Also write a trace of one turn of Esper's side of each case.",
)
def main(
    cases: tuple[str, ...],
    sizes: tuple[str, ...],
    sweep: bool,
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
    import torch
    from rich.console import Console

    from esper.bench import table
    from esper.bench.request import BenchArgs, parse_size
    from esper.config import ConfigError
    from esper.files.system_info import summary_lines

    try:
        request = BenchArgs(tuple(parse_size(size) for size in sizes), devices(device), sweep, quick)
        modules = load(cases, request)
    except ConfigError as error:
        raise click.ClickException(str(error)) from error
    torch.set_num_threads(threads)
    console = Console(width=None if sys.stdout.isatty() else WIDE)
    heading = [*summary_lines(paths=False), f"Threads inside an operator: {torch.get_num_threads()}"]
    console.print("\n".join(heading), highlight=False)

    def save(results: list[Result]) -> None:
        if json_file is not None:
            json_file.write_text(json.dumps([result.as_json() for result in results], indent=2) + "\n")
        if markdown_file is not None:
            markdown_file.write_text(table.markdown(results, heading))

    results = measure_all(modules, request, rounds, seconds, bool(cases), console, save)
    save(results)  # also if there are none
    table.print_results(results, console)
    if trace_file is not None:
        trace_all([case for case in modules if any(r.case.startswith(case) for r in results)], request, trace_file)


def devices(name: str) -> tuple[torch.device, ...]:
    """Returns the devices that ``--device`` stands for. Raises ConfigError for a missing GPU, listing the devices."""
    import torch

    from esper.files.system_info import check_device

    if name != "auto":
        check_device(name)
        return (torch.device(name),)
    return tuple(torch.device(each) for each in ("cpu", "cuda")[: 1 + torch.cuda.is_available()])


def load(cases: tuple[str, ...], request: BenchArgs) -> dict[str, Any]:
    """Returns the modules of ``cases`` by name (all if empty). Raises ConfigError for sizes that one does not take."""
    import importlib

    from esper.config import ConfigError

    if request.sizes and not cases:
        raise ConfigError(f"--size requires the names of cases; known: {', '.join(sorted(CASES))}")
    modules = {case: importlib.import_module(CASES[case]) for case in cases or sorted(CASES)}
    for case, module in modules.items():
        module.SIZE.check(case, request.sizes)
    return modules


def measure_all(
    modules: dict[str, Any],
    request: BenchArgs,
    rounds: int,
    seconds: float,
    named: bool,
    console: Console,
    save: Callable[[list[Result]], None],
) -> list[Result]:
    """Measures all comparisons of all cases, printing a line for each as it is done.

    A case that cannot be measured here, because its baseline is not installed, is skipped with a message. If the cases
    were ``named`` and nothing of one can be measured, that is an error. ``save`` gets all results so far after each
    comparison, so that an interrupt loses none of them.

    Raises:
        click.ClickException: nothing of a named case can be measured.
    """
    from esper.bench import runner
    from esper.config import ConfigError

    results: list[runner.Result] = []
    for case, module in modules.items():
        first = len(results)
        try:
            for comparison in module.comparisons(request):
                result = runner.measure(comparison, rounds, max_seconds=seconds)
                results.append(result)
                save(results)
                console.print(f"  {result.case}, {result.size}, {result.device}: {result.ratio:.2f}", highlight=False)
        except ConfigError as error:  # the baseline is not installed
            if named and len(results) == first:
                raise click.ClickException(str(error)) from error
            console.print(f"{case} was skipped: {error}")
    return results


def trace_all(cases: list[str], request: BenchArgs, path: Path) -> None:
    """Traces one turn of Esper's side in the first comparison of each case, warmed up, after all measurements."""
    from contextlib import closing

    from esper.bench.trace import TraceFile

    trace = TraceFile()
    for case, module in load(tuple(cases), request).items():
        with closing(module.comparisons(request)) as comparisons:
            run = next(comparisons).run
            run()
            trace.add(case, run)
    trace.write(path)
