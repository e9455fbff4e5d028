"""Measure what native steps have to reach, each row beside the fastest loop in PyTorch, and print one table.

    python benchmarks/native_bars.py [ROW ...]

A row takes up to a minute on two cores; the numbers of rows choose some. `fashion_mnist` must have been downloaded.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from esper.data.digits import mlp_of_widths
from esper.data.task import Task
from esper.data.tasks import load_task
from esper.hosts.sizes import HostFamily

ROWS = (
    "train-task --task digits --size 8x128",
    "train-task --task digits --size 8x64",
    "train-task --task digits_table --size 8x32",
    "train-task --task benchmarks/native_bars.py:mlp --size 8x32",
    "train-epoch --size 4x128x8",
    "train-epoch --size 4x32x8",
    "train-epoch --size 4x128x32",
    "grow-task --task digits --size 8x64 --rounds 30",
    "grow-task --task fashion_mnist --size 4x128 --rounds 30",
    "workers --task digits --size 8x64",
)
START = "from esper.bench.main import main; main()"
SECONDS = 15
HEAD = "| | case | size | baseline | own | baseline's | ratio (10 % to 90 %) | bar |"


def mlp() -> Task:
    """The task `digits_table` with the host 64-16-16-10."""
    host = HostFamily(lambda width: mlp_of_widths(width, width), width=16)
    return replace(load_task("digits_table"), build_host=host)


def measure(row: str) -> dict[str, object]:
    """Runs `esper-bench` and returns its result. Raises CalledProcessError if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "result.json")
        command = f"{row} --device cpu --seconds {SECONDS} --json {file}".split()
        subprocess.run(
            [sys.executable, "-c", START, *command],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        (result,) = json.loads(file.read_text())
    return dict(result)


def line(number: int, result: dict[str, object]) -> str:
    bar = "" if result["bar"] is None else f"{result['bar']:g}"
    if not result["usable"]:
        bar += ", baseline unsteady"
    elif result["met"] is not None:
        bar += ", met" if result["met"] else ", missed"
    cells = (
        str(number),
        str(result["case"]),
        str(result["size"]),
        str(result["baseline"]),
        f"{result['value']:,.0f} {result['unit']}",
        f"{result['baseline_value']:,.0f}",
        f"{result['ratio']:.2f} ({result['ratio_low']:.2f} to {result['ratio_high']:.2f})",
        bar,
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("rows", nargs="*", type=int, metavar="ROW", help="1 to 10")
    rows = parser.parse_args().rows or range(1, len(ROWS) + 1)
    if not all(1 <= row <= len(ROWS) for row in rows):
        parser.error(f"rows are 1 to {len(ROWS)}")
    print(f"{HEAD}\n{'|---' * HEAD.count(' |')}|", flush=True)
    for number in rows:
        print(line(number, measure(ROWS[number - 1])), flush=True)


if __name__ == "__main__":
    main()
