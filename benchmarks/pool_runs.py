"""The results of one command with several training seeds, pooled: the figures of results/digits_ppo.md.

    for seed in 0 1 2 3 4; do esper run --seed $seed --out runs/seed-$seed; done
    python benchmarks/pool_runs.py runs/seed-*

Reads the checkpoints of finished runs whose controller learns, and prints Markdown: for each run the paired differences
in test accuracy (pp) between the agent and each baseline, then all runs together. The pooled intervals resample
training seeds, and hosts within them, so they cover the spread of training.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from esper.config import ConfigError
from esper.evaluation.runner import HostResult
from esper.evaluation.statistics import Floats, PairedComparison, compare_pairs
from esper.files import checkpoint


def hosts_of(folder: Path) -> dict[str, list[HostResult]]:
    """Returns the compared hosts of a finished run by controller, the agent first."""
    state = checkpoint.read(folder)
    rounds = state.get("agent", state).get("compared", {})
    if not rounds or not all(rounds.values()):
        raise ConfigError(f"{folder} has no comparison yet: finish it with esper run --resume {folder}")
    return {
        name: [HostResult.parse(host) for number in sorted(by_round, key=int) for host in by_round[number]]
        for name, by_round in rounds.items()
    }


def cell(pair: PairedComparison) -> str:
    low, high = pair.interval
    return f"{pair.difference:+.2f} [{low:.2f}, {high:.2f}]"


def accuracies(hosts: list[HostResult]) -> Floats:
    return np.array([host.accuracy for host in hosts])


def pool(folders: list[Path]) -> None:
    """Prints a table of runs that differ in their seed, and one of all of them together."""
    runs = [hosts_of(folder) for folder in folders]
    agent, *baselines = runs[0]
    if any(list(run) != [agent, *baselines] or len(run[agent]) != len(runs[0][agent]) for run in runs):
        raise ConfigError("the runs compare different controllers, or different numbers of hosts")
    heads = [f"minus `{name}`" for name in baselines]
    print("| " + " | ".join(["run", *heads, "seeds kept", "parameters"]) + " |")
    print("|---" * (len(heads) + 3) + "|")
    for folder, run in zip(folders, runs, strict=True):
        pairs = [compare_pairs(accuracies(run[agent]), accuracies(run[name])) for name in baselines]
        kept = np.mean([host.fossils for host in run[agent]])
        parameters = np.mean([host.parameters for host in run[agent]])
        print(f"| {folder.name} | {' | '.join(map(cell, pairs))} | {kept:.1f} | {parameters:,.0f} |")
    print(f"\nTogether ({len(runs)} training seeds):\n")
    print("| | mean % | parameters | agent minus it, pp |\n|---|---|---|---|")
    ours = np.concatenate([accuracies(run[agent]) for run in runs])
    for name in (agent, *baselines):
        theirs = np.concatenate([accuracies(run[name]) for run in runs])
        parameters = np.mean([host.parameters for run in runs for host in run[name]])
        difference = "" if name == agent else cell(compare_pairs(ours, theirs, train_seeds=len(runs)))
        print(f"| `{name}` | {theirs.mean():.2f} | {parameters:,.0f} | {difference} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", metavar="RUN_FOLDER")
    arguments = parser.parse_args()
    try:
        pool(arguments.folders)
    except ConfigError as error:
        raise SystemExit(f"Error: {error}") from None
