"""Is a host that grows in steps as good as the wider host that is trained from the start, and what does it save?

    python -m benchmarks.grown_in_steps tune digits
    python -m benchmarks.grown_in_steps judge digits

Hosts double all their layers before the steps of their task, and merge what has grown (``env.merge``). Beside them
`bigger` has the final widths from the first epoch on, for as many epochs. `tune` tries learning rates of 1/8 to 2 times
the task's for hosts alone, for `bigger` and for growth, on hosts of their own, by validation accuracy. `judge` compares
the arms at their best rates, which RATES has, and prints test accuracies and compute, and seconds in which the arms
took turns, as Markdown.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.timed import compared
from esper.compare.runner import HostResult
from esper.compare.statistics import compare_pairs
from esper.data.digits import build_mlp
from esper.data.task import Task
from esper.data.tasks import load_task
from esper.hosts.cnn import CNNHost

TUNING_SEED, JUDGING_SEED = 12_100, 73_000
MARGIN, LOWEST = -0.5, -0.8
"""Bars of the difference to `bigger` and of its interval, pp."""
FACTORS = (0.125, 0.25, 0.5, 1.0, 2.0)
"""Rates that are tried, in units of the task's."""
STEPS = {
    "digits": (2, 4),
    "digits_table": (2, 4),
    "mnist5k": (1, 3),
    "fashion_mnist": (1, 2),
}
"""Epochs before which all layers are doubled."""
RATES = {
    "digits": {"grown": 1.0, "bigger": 1.0, "none": 2.0},
    "digits_table": {"grown": 0.5, "bigger": 1.0, "none": 2.0},
    "mnist5k": {"grown": 1.0, "bigger": 1.0, "none": 2.0},
    "fashion_mnist": {"grown": 0.25, "bigger": 0.5, "none": 1.0},
}
"""The best factors of each arm."""
WARMUPS = {("fashion_mnist", "grown"): 5.0}
"""Epochs of warm-up of arms that do better with another one than the task's."""
ARMS = {
    "grown": "schedule:SCHEDULE",
    "bigger": "bigger",
    "none": "none",
}
Hosts = dict[str, list[HostResult]]


def narrow(name: str) -> Task:
    """Returns the task of that name; large images have blocks of 3, 6 and 12 channels, and rows 6 hidden units."""
    task = load_task(name)
    if name == "digits_table":
        task = replace(task, build_host=replace(build_mlp, width=6))
    if name in ("mnist5k", "fashion_mnist"):
        host = partial(CNNHost, in_channels=1, classes=10, base=3, blocks=3)
        task = replace(task, build_host=host)
    return task


def write_schedule(task: Task, file: Path) -> None:
    """Writes the growth of a task."""
    host = task.new_host(["r2"])
    lines = [
        f'[[action]]\nepoch = {epoch}\nop = "GERMINATE"\nslot = "{slot}"\nblueprint = "widen_whole"\n'
        for epoch in STEPS[task.name]
        for slot in host.slot_names
    ]
    file.write_text("\n".join(lines))


def play(
    task: Task, arms: dict[str, tuple[str, float]], pairs: int, seed: int
) -> tuple[Hosts, dict[str, float]]:
    """Plays arms, each a controller and a factor of the rate; returns the hosts of each, and its seconds."""
    base: dict[str, Any] = {
        "task": {"name": task.name},
        "run": {"seed": seed},
        "env": {
            "baseline_episodes": 1,
            "n_envs": 8,
            "slots": ["r2"],
            "at_once": True,
            "merge": True,
            "edits_per_epoch": 8,
            "parameter_budget": 100.0,
        },
    }
    with TemporaryDirectory() as folder:
        schedule = Path(folder) / "steps.toml"
        write_schedule(task, schedule)
        texts = []
        for arm, (controller, factor) in arms.items():
            controller = controller.replace("SCHEDULE", str(schedule))
            rate = factor * task.learning_rate
            text = f"{arm}:controller={controller},task.learning_rate={rate:.6g}"
            kind, _, _ = arm.partition(" ")  # tuning has several rates of a kind
            if (task.name, kind) in WARMUPS:
                text += f",task.warmup_epochs={WARMUPS[task.name, kind]}"
            texts.append(text)
        return compared(texts, base, pairs, task, Path(folder))


def tune(task: Task, pairs: int) -> None:
    """Prints the validation accuracy of each arm at each rate."""
    arms = {
        f"{arm} {factor:g}": (controller, factor)
        for arm, controller in ARMS.items()
        for factor in FACTORS
    }
    hosts, _ = play(task, arms, pairs, TUNING_SEED)
    for arm in ARMS:
        scores = []
        for factor in FACTORS:
            found = hosts[f"{arm} {factor:g}"]
            scores.append(
                np.mean([float(host.facts["validation_accuracy"]) for host in found])
            )
        shown = ", ".join(
            f"{factor:g}: {score:.2f}"
            for factor, score in zip(FACTORS, scores, strict=True)
        )
        print(
            f"{task.name}, {arm}: {shown}; best {FACTORS[int(np.argmax(scores))]:g}",
            flush=True,
        )


def judge(task: Task, pairs: int) -> None:
    """Prints the arms at their best rates."""
    best = RATES[task.name]
    arms = {arm: (controller, best[arm]) for arm, controller in ARMS.items()}
    hosts, seconds = play(task, arms, pairs, JUDGING_SEED)
    scores = {
        arm: np.array([host.accuracy for host in found]) for arm, found in hosts.items()
    }

    def mean(arm: str, what: str) -> float:
        return float(np.mean([getattr(host, what) for host in hosts[arm]]))

    print(
        f"\n{task.name}: all layers doubled before epochs {STEPS[task.name]} of {task.episode_length}, {pairs} pairs\n"
    )
    print(
        "| arm | rate | test % | grown minus it | parameters | compute of grown / its | seconds of grown / its |"
    )
    print("|---|---|---|---|---|---|---|")
    for arm in hosts:
        cells = [
            arm,
            f"{best[arm]:g}",
            f"{scores[arm].mean():.2f}",
            "",
            f"{mean(arm, 'parameters'):,.0f}",
            "",
            "",
        ]
        if arm != "grown":
            pair = compare_pairs(scores["grown"], scores[arm])
            interval = pair.interval
            cells[3] = (
                f"{pair.difference:+.2f} [{interval.low:+.2f}, {interval.high:+.2f}]"
            )
            cells[5] = f"{mean('grown', 'flops') / mean(arm, 'flops'):.2f}"
            cells[6] = f"{seconds['grown'] / seconds[arm]:.2f}"
        print(f"| {' | '.join(cells)} |", flush=True)
        if arm == "bigger":
            met = pair.difference >= MARGIN and interval.low > LOWEST
            print(f"| | | | {'met' if met else 'missed'} | | | |")


def main() -> None:
    """Tune or judge one task."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=("tune", "judge"))
    parser.add_argument("task", choices=STEPS)
    parser.add_argument("--pairs", type=int, help="hosts; 16 to tune, 160 to judge")
    options = parser.parse_args()
    task = narrow(options.task)
    if options.what == "tune":
        tune(task, options.pairs or 16)
    else:
        judge(task, options.pairs or 160)


if __name__ == "__main__":
    main()
