"""The results of one command with several training seeds, pooled: the figures of results/digits_ppo.md.

    for seed in 0 1 2 3 4; do esper run --seed $seed --rounds 20 --out runs/seed-$seed; done
    python benchmarks/pool_runs.py runs/seed-*

Reads the checkpoints of finished runs whose controller learns, and prints Markdown: for each run the paired differences
in test accuracy (pp) between the agent and each baseline, and what its hosts gain as a share of what the better of
`plans` and `schedule` gains; then all runs together. The pooled intervals resample training seeds, and hosts within
them, so they cover the spread of training.

Instead of runs, the folder of a comparison may be given, in which the agent and the `plans` of each run play the same
hosts: arms `checkpoint:RUN` and `plans:RUN`, and those that belong to no run.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from operator import itemgetter
from pathlib import Path

import numpy as np

from esper.compare.runner import HostResult
from esper.compare.statistics import Floats, PairedComparison, compare_pairs
from esper.config import ConfigError
from esper.files import checkpoint

BASELINES = ("none", "random", "heuristic", "plans", "schedule")
"""Controllers that an agent is compared with, in the order of a run."""
Run = dict[str, list[HostResult]]
"""Hosts by what played them, the agent first."""


def hosts_of(folder: Path) -> Run:
    """Returns the compared hosts of a finished run."""
    state = checkpoint.read(folder)
    rounds = state.get("agent", state).get("compared", {})
    if not rounds or not all(rounds.values()):
        raise ConfigError(
            f"{folder} has no comparison yet: finish it with esper run --resume {folder}"
        )
    found: Run = {}
    for name, by_round in rounds.items():
        found[name] = []
        for number in sorted(by_round, key=int):
            found[name] += map(HostResult.parse, by_round[number])
    return found


def compared_runs(folder: Path) -> dict[str, Run]:
    """Returns the hosts of each run whose agent was compared in ``folder``, with those of the arms of no run."""
    lines = (folder / "played.jsonl").read_text(encoding="utf-8").splitlines()
    arms: Run = defaultdict(list)
    for played in sorted(map(json.loads, lines), key=itemgetter("round")):
        arms[played["arm"]] += map(HostResult.parse, played["hosts"])
    runs = {}
    for name in sorted(arms):
        kind, _, run = name.partition(":")
        if kind != "checkpoint":
            continue
        own = {**arms, "plans": arms[f"plans:{run}"]}
        baselines = {name: own[name] for name in BASELINES if name in own}
        runs[Path(run).name] = {"ppo": arms[f"checkpoint:{run}"], **baselines}
    return runs


def cell(pair: PairedComparison) -> str:
    low, high = pair.interval
    return f"{pair.difference:+.2f} [{low:.2f}, {high:.2f}]"


def accuracies(hosts: list[HostResult]) -> Floats:
    return np.array([host.accuracy for host in hosts])


def parameters(hosts: list[HostResult]) -> str:
    return f"{np.mean([host.parameters for host in hosts]):,.0f}"


def share(run: Run, agent: str) -> str:
    """Returns what the agent's hosts gain over those left alone, as a share of the better of `plans` and `schedule`."""
    mean = {name: accuracies(hosts).mean() for name, hosts in run.items()}
    best = max(mean["plans"], mean["schedule"])
    return f"{(mean[agent] - mean['none']) / (best - mean['none']):.2f}"


def pool(runs: dict[str, Run]) -> None:
    """Prints a table of runs that differ in their seed, and one of all of them together."""
    agent, *baselines = next(iter(runs.values()))
    sizes = {len(hosts) for run in runs.values() for hosts in run.values()}
    if any(set(run) != {agent, *baselines} for run in runs.values()) or len(sizes) > 1:
        raise ConfigError(
            "the runs compare different controllers, or different numbers of hosts"
        )
    heads = [f"minus `{name}`" for name in baselines]
    print(
        "| "
        + " | ".join(["run", *heads, "share", "seeds kept", "parameters", "of `plans`"])
        + " |"
    )
    print("|---" * (len(heads) + 5) + "|")
    for name, run in runs.items():
        pairs = []
        for other in baselines:
            pair = compare_pairs(accuracies(run[agent]), accuracies(run[other]))
            pairs.append(cell(pair))
        kept = np.mean([host.fossils for host in run[agent]])
        last = [
            share(run, agent),
            f"{kept:.1f}",
            parameters(run[agent]),
            parameters(run["plans"]),
        ]
        print(f"| {' | '.join([name, *pairs, *last])} |")
    print(f"\nTogether ({len(runs)} training seeds):\n")
    print("| | mean % | parameters | agent minus it, pp |\n|---|---|---|---|")
    ours = np.concatenate([accuracies(run[agent]) for run in runs.values()])
    for name in (agent, *baselines):
        hosts = [host for run in runs.values() for host in run[name]]
        theirs = accuracies(hosts)
        difference = (
            ""
            if name == agent
            else cell(compare_pairs(ours, theirs, train_seeds=len(runs)))
        )
        print(
            f"| `{name}` | {theirs.mean():.2f} | {parameters(hosts)} | {difference} |"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folders",
        type=Path,
        nargs="+",
        metavar="FOLDER",
        help="finished runs, or one comparison",
    )
    folders = parser.parse_args().folders
    try:
        one = len(folders) == 1 and (folders[0] / "played.jsonl").exists()
        pool(
            compared_runs(folders[0])
            if one
            else {folder.name: hosts_of(folder) for folder in folders}
        )
    except ConfigError as error:
        raise SystemExit(f"Error: {error}") from None
