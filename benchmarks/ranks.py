"""Hosts spread over ranks against lanes of one process: speed, waiting, bytes and memory of training rounds.

    python benchmarks/ranks.py                          digits, 8 hosts: 2 ranks of one lane against one process of two
    python benchmarks/ranks.py --setups 1x1,2x1,4x1     ranks x lanes, the first is what the others are compared with
    python benchmarks/ranks.py --task chars --rounds 6 --turns 5 --set task.batch_size=128
    python benchmarks/ranks.py --costs --out benchmarks/results/ranks.md    1, 2 and 4 ranks, and a model of their cost

The setups take turns, so that the load of other processes affects all of them. Every run has the same hosts.
"""

from __future__ import annotations

import argparse
import csv
import json
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch.distributed as dist

from esper import _runtime
from esper.config import TrainingConfig, set_dotted
from esper.env.rank_hosts import RankServer
from esper.files.system_info import summary_lines
from esper.telemetry.event import Event, RoundCompleted
from esper.training.execution.ranks import RunRanks

ON_HOSTS = ("train", "stage", "validate", "govern")
"""Phases that ranks share; the others are rank 0's."""
SMALL, LARGE, ECHOES = 1_000, 4_000_000, 50
"""Bytes of the messages that the wire is measured with, and their number."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--setups",
        help="ranks x lanes of each; the first is the baseline  [default: 1x2,2x1]",
    )
    parser.add_argument("--task", default="digits")
    parser.add_argument("--controller", default="schedule")
    parser.add_argument("--envs", type=int, default=8)
    parser.add_argument(
        "--rounds",
        type=int,
        default=4,
        help="the first one warms up and does not count",
    )
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C")
    parser.add_argument(
        "--costs",
        action="store_true",
        help="1, 2 and 4 ranks of one lane, and a model of their cost",
    )
    parser.add_argument("--out", type=Path, help="also write the tables to this page")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--lanes", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.setups = args.setups or ("1x1,2x1,4x1" if args.costs else "1x2,2x1")
    if args.costs and not args.setups.startswith("1x1,"):
        parser.error(
            "--costs compares with one rank of one lane: begin --setups with 1x1"
        )
    return args


def config_of(args: argparse.Namespace) -> TrainingConfig:
    run = {"controller": args.controller, "rounds": args.rounds, "lanes": args.lanes}
    tables = {"run": run, "task": {"name": args.task}, "env": {"n_envs": args.envs}}
    for assignment in args.set:
        set_dotted(tables, assignment)
    return TrainingConfig.parse(tables)


def echo(_server: RankServer, message: Any) -> Any:
    """Sends back what it receives, to measure the wire."""
    return message


def echo_seconds(ranks: RunRanks, size: int) -> float:
    """Median seconds in which ``size`` bytes go to rank 1 and come back."""
    seconds, message = [], bytes(size)
    for _ in range(ECHOES):
        began = time.perf_counter()
        ranks.start({1: (echo, message)})
        ranks.finish()
        seconds.append(time.perf_counter() - began)
    ranks.seconds, ranks.idle = 0.0, []
    return statistics.median(seconds)


class RoundNotes:
    """Notes after each round: bytes on the wire, seconds of joint work, and seconds that a rank waited on average."""

    def __init__(self, ranks: RunRanks) -> None:
        self.ranks, self.rounds = ranks, list[tuple[float, ...]]()
        self.bytes = 0
        scatter, gather = dist.scatter_object_list, dist.gather_object

        def counted_scatter(received: Any, calls: list[Any], **more: Any) -> None:
            self.bytes += sum(len(pickle.dumps(call)) for call in calls[1:])
            scatter(received, calls, **more)

        def counted_gather(reply: Any, replies: list[Any], **more: Any) -> None:
            gather(reply, replies, **more)
            self.bytes += sum(len(pickle.dumps(reply)) for reply in replies[1:])

        dist.scatter_object_list, dist.gather_object = counted_scatter, counted_gather

    def handle(self, event: Event) -> None:
        if isinstance(event, RoundCompleted):
            self.rounds.append(
                (
                    self.bytes,
                    self.ranks.seconds,
                    sum(self.ranks.idle) / self.ranks.size,
                )
            )

    def of_rounds(self) -> dict[str, list[float]]:
        """Returns the values of each round but the first, which begins with loading and making."""
        each = [
            [b - a for a, b in zip(*pair, strict=True)]
            for pair in pairwise(self.rounds)
        ]
        return dict(
            zip(
                ("bytes", "joint", "idle"),
                map(list, zip(*each, strict=True)),
                strict=True,
            )
        )

    def close(self) -> None:
        pass


def child(args: argparse.Namespace) -> None:
    """One rank of one run; leaves what it measured in the folder."""
    found: dict[str, Any] = {}
    with RunRanks.joined() as ranks:
        if ranks is not None and not ranks.first:
            RankServer(ranks).serve()
            number = ranks.rank
        else:
            from esper.run.experiment import Experiment  # other ranks do without

            number, notes = 0, None if ranks is None else RoundNotes(ranks)
            echoes = (
                []
                if ranks is None
                else [echo_seconds(ranks, size) for size in (SMALL, LARGE)]
            )
            began = time.perf_counter()
            Experiment(
                config_of(args),
                args.child / "run",
                [] if notes is None else [notes],
                ranks=ranks,
            ).run()
            found = {"total": time.perf_counter() - began}
            if notes is not None:
                found |= notes.of_rounds() | {"echoes": echoes}
    shared = Path("/proc/self/smaps_rollup").read_text().splitlines()
    found["pss"] = (
        sum(int(line.split()[1]) for line in shared if line.startswith("Pss:")) / 1024
    )
    (args.child / f"rank{number}.json").write_text(json.dumps(found))


def play(args: argparse.Namespace, ranks: int, lanes: int) -> dict[str, float]:
    """Plays a run with this setup and returns what it cost."""
    with tempfile.TemporaryDirectory() as folder:
        launcher = (
            [
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                str(ranks),
            ]
            if ranks > 1
            else []
        )
        command = [
            sys.executable,
            *launcher,
            __file__,
            *sys.argv[1:],
            "--child",
            folder,
            "--lanes",
            str(lanes),
        ]
        subprocess.run(command, check=True, capture_output=True)
        each = [
            json.loads((Path(folder) / f"rank{rank}.json").read_text())
            for rank in range(ranks)
        ]
        with (Path(folder) / "run" / "metrics.csv").open(newline="") as file:
            rounds = list(csv.DictReader(file))[1:]

    def median(value: Callable[[dict[str, str]], float]) -> float:
        return statistics.median(map(value, rounds))

    def phases(row: dict[str, str], names: tuple[str, ...]) -> float:
        return sum(float(row[f"phase/{name}"] or 0) for name in names)

    first, epochs = each[0], median(lambda row: float(row["epochs"]))
    small, large = first.get("echoes") or (0.0, 0.0)
    # Hosts left alone train in the round, too, if the controller does not learn.
    trained = epochs * (2 if rounds[0]["alone_test_accuracy"] else 1)
    away = trained * (1 - -(-args.envs // ranks) / args.envs)
    return {
        "env steps/s": median(lambda row: float(row["epochs_per_second"])),
        "run, s": first["total"],
        "round, s": median(lambda row: float(row["seconds"])),
        "own hosts, s": epochs / median(lambda row: float(row["epochs_per_second"])),
        "waiting, %": 100 * sum(first["idle"]) / sum(first["joint"])
        if "joint" in first
        else 0.0,
        "kB a round": statistics.median(first.get("bytes", [0])) / 1000,
        "memory, MiB": sum(rank["pss"] for rank in each),
        # of the model
        "host_ms": 1000 * median(lambda row: phases(row, ON_HOSTS)) / epochs,
        "own_ms": 1000
        * median(
            lambda row: (
                1 / float(row["epochs_per_second"]) - phases(row, ON_HOSTS) / epochs
            )
        )
        + 1000 * median(lambda row: phases(row, ("update",))) / epochs,
        "message_ms": 1000 * small,
        "mb_per_s": 2 * (LARGE - SMALL) / 1e6 / (large - small)
        if large > small
        else 0.0,
        "host_kb": statistics.median(first.get("bytes", [0])) / 1000 / away
        if away
        else 0.0,
        "epochs": epochs,
    }


SHOWN = (
    "env steps/s",
    "run, s",
    "round, s",
    "own hosts, s",
    "waiting, %",
    "kB a round",
    "memory, MiB",
)
Setup = tuple[int, int]


def table(found: dict[Setup, list[dict[str, float]]]) -> list[str]:
    """Medians over turns of each setup, and its speed beside that of the first one."""
    base = [turn["env steps/s"] for turn in next(iter(found.values()))]
    lines = [
        "| ranks x lanes | " + " | ".join(SHOWN) + " | speed-up |",
        "|---" * (len(SHOWN) + 2) + "|",
    ]
    for setup, turns in found.items():
        cells = [f"{median_of(turns, name):.1f}" for name in SHOWN]
        ratio = statistics.median(
            turn["env steps/s"] / b for turn, b in zip(turns, base, strict=True)
        )
        lines.append(f"| {setup[0]} x {setup[1]} | {' | '.join(cells)} | {ratio:.2f} |")
    return lines


def median_of(turns: list[dict[str, float]], name: str) -> float:
    return statistics.median(turn[name] for turn in turns)


def cost_lines(
    args: argparse.Namespace, found: dict[Setup, list[dict[str, float]]]
) -> list[str]:
    """The model's values, what it says of the measured setups, and what it predicts."""
    from rank_model import Costs, markdown  # beside this script

    alone, two = found[1, 1], found[next(setup for setup in found if setup[0] > 1)]
    costs = Costs(
        host=median_of(alone, "host_ms") / 1000,
        own=median_of(alone, "own_ms") / 1000,
        message=median_of(two, "message_ms") / 1000,
        kilobytes=median_of(two, "host_kb"),
        megabytes_per_second=median_of(two, "mb_per_s"),
    )
    epochs, cores = median_of(alone, "epochs") / args.envs, _runtime.physical_cores()
    one_lane = {ranks: turns for (ranks, lanes), turns in found.items() if lanes == 1}
    measured = {
        ranks: median_of(turns, "own hosts, s") / epochs
        for ranks, turns in one_lane.items()
    }
    return markdown(costs, measured, args.envs, cores)


def main() -> None:
    args = arguments()
    if args.child is not None:
        child(args)
        return
    setups = [
        (int(ranks), int(lanes))
        for ranks, lanes in (setup.split("x") for setup in args.setups.split(","))
    ]
    found: dict[Setup, list[dict[str, float]]] = {setup: [] for setup in setups}
    for turn in range(args.turns):
        for setup in setups:
            found[setup].append(play(args, *setup))
            told = {name: round(value, 3) for name, value in found[setup][-1].items()}
            print(
                f"turn {turn + 1}/{args.turns}, {setup[0]} ranks of {setup[1]} lanes: {told}",
                flush=True,
            )
    lines = [*table(found), *(cost_lines(args, found) if args.costs else [])]
    print("\n" + "\n".join(lines))
    if args.out is not None:
        what = f"`{args.task}`, {args.envs} hosts, {args.controller}; {args.turns} x {args.rounds - 1} rounds"
        head = ["# Ranks", "", f"{what}. docs/processes.md explains ranks.", ""]
        command = [
            "",
            f"    python benchmarks/ranks.py {' '.join(sys.argv[1:])}",
            "",
            "Made with:",
            "",
        ]
        made = [f"    {line}" for line in summary_lines(paths=False)]
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(
            "\n".join([*head, *lines, *command, *made]) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
