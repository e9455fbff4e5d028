"""Measures cases one after another, on the devices of this machine."""

import importlib
import json
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from rich.console import Console

from esper.bench import CASES, runner
from esper.bench.case import BenchArgs
from esper.bench.profiling import chrome_trace
from esper.config import ConfigError
from esper.files.system_info import check_device
from esper.telemetry.text import duration


def devices(name: str) -> tuple[torch.device, ...]:
    """Returns the devices that ``--device`` stands for. Raises ConfigError for a missing GPU, listing the devices."""
    if name != "auto":
        return (check_device(name),)
    cpu = torch.device("cpu")
    if not torch.cuda.is_available():
        return (cpu,)
    return cpu, torch.device("cuda")


def load(cases: tuple[str, ...], args: BenchArgs) -> dict[str, ModuleType]:
    """Returns the modules of ``cases`` by name (all if empty). Raises ConfigError for sizes that one does not take."""
    if args.sizes and not cases:
        raise ConfigError(f"--size requires the names of cases; known: {', '.join(sorted(CASES))}")
    modules = {case: importlib.import_module(CASES[case]) for case in cases or sorted(CASES)}
    for case, module in modules.items():
        module.SIZES.check(case, args.sizes)
    return modules


def measure_all(
    modules: dict[str, ModuleType],
    args: BenchArgs,
    named: bool,
    console: Console,
    save: Callable[[list[runner.Result]], None],
) -> list[runner.Result]:
    """Measures all comparisons of all cases, printing a line for each as it is done.

    A case whose baseline is not installed is skipped with a message, but raises ConfigError if the cases were ``named``
    and none of it was measured. ``save`` gets all results so far after each comparison, so an interrupt loses none.
    """
    results: list[runner.Result] = []
    for case, module in modules.items():
        first = len(results)
        try:
            for comparison in module.comparisons(args):
                result = runner.measure(comparison, args.rounds, max_seconds=args.seconds)
                results.append(result)
                save(results)
                console.print(
                    f"  {result.case}, {result.size}, {result.device}: {result.ratio:.2f}",
                    highlight=False,
                )
        except ConfigError as error:  # the baseline is not installed
            if named and len(results) == first:
                raise
            console.print(f"{case} was skipped: {error}")
    return results


def estimate(modules: dict[str, ModuleType], args: BenchArgs) -> str:
    """Returns a line about the time that all cases take on two idle cores, from the times of their sizes.

    Empty with ``--quick``, which takes a few seconds a case.
    """
    if args.quick:
        return ""
    share = min(1.0, args.rounds / BenchArgs().rounds)
    seconds: dict[str, float] = {}
    for case, module in modules.items():
        sizes = list(module.SIZES.of(args))
        seconds[case] = share * module.SIZES.seconds * len(sizes)
    longest = sorted(seconds, key=seconds.__getitem__, reverse=True)[:3]
    parts = ", ".join(f"{case} {duration(seconds[case])}" for case in longest)
    return f"About {duration(sum(seconds.values()))} on two idle cores: {parts}"


def trace_all(modules: Iterable[ModuleType], args: BenchArgs, path: Path) -> None:
    """Traces one turn of Esper's side in the first comparison of each case, warmed up, after all measurements."""
    trace: dict[str, Any] = {"traceEvents": []}
    for module in modules:
        with closing(module.comparisons(args)) as comparisons:
            run = next(comparisons).run
            run()
            turn = chrome_trace(module.NAME, run)
        trace = {**turn, "traceEvents": trace["traceEvents"] + turn["traceEvents"]}
    path.write_text(json.dumps(trace))
