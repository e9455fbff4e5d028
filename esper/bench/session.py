"""Measures cases one after another, on the devices of this machine, and writes the results."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console

from esper.bench import CASES, runner, table
from esper.bench.case import BenchArgs, Case, load_case
from esper.config import ConfigError
from esper.files.system_info import check_device


def devices(name: str) -> tuple[torch.device, ...]:
    """Returns the devices that ``--device`` stands for. Raises ConfigError for a missing GPU, listing the devices."""
    if name != "auto":
        return (check_device(name),)
    if torch.cuda.is_available():
        return torch.device("cpu"), torch.device("cuda")
    return (torch.device("cpu"),)


def load(names: tuple[str, ...], args: BenchArgs) -> dict[str, Case]:
    """Returns cases by name (all if no name is given). Raises ConfigError for sizes that one of them does not take."""
    if args.sizes and not names:
        raise ConfigError(f"--size requires the names of cases; known: {', '.join(sorted(CASES))}")
    cases = {name: load_case(name) for name in names or sorted(CASES)}
    for name, case in cases.items():
        for size in args.sizes:
            case.check(name, size)
    return cases


def measured(
    cases: dict[str, Case],
    args: BenchArgs,
    named: bool,
    console: Console,
) -> Iterator[runner.Result]:
    """Yields the result of each comparison of all cases, with a line on the console.

    A case whose baseline is not installed is skipped with a message; it raises ConfigError if cases were ``named``.
    """
    for name, case in cases.items():
        try:
            for comparison in case.comparisons(args):
                result = runner.measure(comparison, args.rounds, args.seconds)
                console.print(
                    f"  {result.case}, {result.size}, {result.device}: {result.ratio:.2f}",
                    highlight=False,
                )
                yield result
        except ConfigError as error:  # the baseline is not installed
            if named:
                raise
            console.print(f"{name} was skipped: {error}")


def save(
    results: list[runner.Result],
    heading: list[str],
    json_file: Path | None,
    markdown_file: Path | None,
) -> None:
    """Writes the files that are asked for."""
    if json_file is not None:
        rows = [asdict(result) for result in results]
        json_file.write_text(json.dumps(rows, indent=2) + "\n")
    if markdown_file is not None:
        markdown_file.write_text(table.markdown(results, heading))
