"""Processes against lanes of one process: speed of training rounds.

    python benchmarks/ranks.py                          digits, 8 hosts: 2 processes of one lane against one of two
    python benchmarks/ranks.py --setups 1x1,2x1,4x1     processes x lanes; the first is the baseline
    python benchmarks/ranks.py --task chars --rounds 6 --turns 5 --set task.batch_size=128

Each turn is an `esper run` of every setup, so that the load of other processes affects all of them. Every run has the
same hosts. The first round of a run warms up and does not count. Prints Markdown.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

COLUMNS = {"env steps/s": "epochs_per_second", "round, s": "seconds"}
"""Columns of the table, and those of a run's metrics.csv."""


def read_options() -> argparse.Namespace:
    """Returns the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--setups", default="1x2,2x1", help="[default: 1x2,2x1]")
    parser.add_argument("--task", default="digits")
    parser.add_argument("--controller", default="schedule")
    parser.add_argument("--envs", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C")
    return parser.parse_args()


def play(options: argparse.Namespace, setup: str) -> dict[str, float]:
    """Plays a run with this setup; returns the medians of its rounds."""
    processes, lanes = setup.split("x")
    command = [sys.executable, "-m", "esper", "run", "--processes", processes]
    for name in ("task", "controller", "envs", "rounds"):
        command += [f"--{name}", str(getattr(options, name))]
    for assignment in (f"run.lanes={lanes}", *options.set):
        command += ["--set", assignment]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        subprocess.run([*command, "--out", str(run)], check=True, capture_output=True)
        with (run / "metrics.csv").open(newline="") as file:
            rounds = list(csv.DictReader(file))[1:]
    found = {}
    for name, column in COLUMNS.items():
        found[name] = statistics.median(float(row[column]) for row in rounds)
    return found


def main() -> None:
    options = read_options()
    setups = options.setups.split(",")
    found: dict[str, list[dict[str, float]]] = {setup: [] for setup in setups}
    for turn in range(options.turns):
        for setup in setups:
            found[setup].append(play(options, setup))
            print(f"turn {turn + 1}, {setup}: {found[setup][-1]}", file=sys.stderr)

    print(f"| processes x lanes | {' | '.join(COLUMNS)} | speed-up |")
    print("|---" * (len(COLUMNS) + 2) + "|")
    base = [turn["env steps/s"] for turn in found[setups[0]]]
    for setup, turns in found.items():
        row = [setup]
        for name in COLUMNS:
            median = statistics.median(turn[name] for turn in turns)
            row.append(f"{median:.1f}")
        ratios = [turn["env steps/s"] / b for turn, b in zip(turns, base, strict=True)]
        print(f"| {' | '.join(row)} | {statistics.median(ratios):.2f} |")


if __name__ == "__main__":
    main()
