"""Gains of an agent in its first rounds, while it samples and learns, beside `plans` on the same hosts.

    python benchmarks/first_rounds.py --seeds 0 1 2 3 4

Starts the default run of each seed with the agent, stops it after five rounds, and plays the same rounds with `plans`.
Gains are in validation pp over hosts left alone, means over the rounds.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np

import esper
from esper.telemetry.event import Event, RoundCompleted

ROUNDS = 5


class FirstRounds:
    """A sink that keeps the gains of a run's first rounds, pp, and then stops the run."""

    def __init__(self) -> None:
        self.gains: list[float] = []
        self.experiment: esper.Experiment | None = None

    def handle(self, event: Event) -> None:
        if isinstance(event, RoundCompleted) and self.experiment is not None:
            self.gains.append(event.committed_accuracy - event.baseline_accuracy)
            if len(self.gains) == ROUNDS:
                self.experiment.stop()

    def close(self) -> None:
        """Does nothing: the gains are kept."""


def gain(controller: str, seed: int, folder: Path) -> float:
    """Returns the mean gain of the first rounds of a run, pp."""
    config = esper.TrainingConfig.parse(
        {"run": {"controller": controller, "seed": seed, "evaluation_pairs": 0}}
    )
    first = FirstRounds()
    first.experiment = esper.Experiment(config, folder, [first])
    first.experiment.run()
    return float(np.mean(first.gains))


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Compares the first rounds of an agent with those of plans."
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="run seeds"
    )
    differences = []
    print("seed   agent  plans  difference")
    for seed in parser.parse_args().seeds:
        with tempfile.TemporaryDirectory() as folder:
            agent, plans = (
                gain(name, seed, Path(folder) / name) for name in ("ppo", "plans")
            )
        differences.append(agent - plans)
        print(
            f"{seed:4d}   {agent:+.2f}  {plans:+.2f}  {agent - plans:+.2f}", flush=True
        )
    error = (
        np.std(differences, ddof=1) / np.sqrt(len(differences))
        if len(differences) > 1
        else np.nan
    )
    print(f"mean difference {np.mean(differences):+.2f}, standard error {error:.2f}")


if __name__ == "__main__":
    main()
