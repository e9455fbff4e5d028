"""False alarms of the governor: healthy hosts of a task under simple controllers, and every rollback and anomaly.

    python benchmarks/governor_false_alarms.py --out benchmarks/results/governor_false_alarms.md

All controllers play the same hosts with the default config; nothing is injected. An epoch with an anomaly is one whose
validation loss was above the divergence threshold. Each alarm is listed with the losses that led to it and with what
was done to blended seeds shortly before: a host that loses a seed it leans on really gets worse.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from esper.agents.make import make_controller
from esper.config import TrainingConfig
from esper.env.make import EnvMaker
from esper.env.vector_env import GrowthVectorEnv
from esper.files.system_info import summary_lines
from esper.run.rollout import play_round
from esper.telemetry.event import (
    EpisodeCompleted,
    EpochCompleted,
    Event,
    GovernorRollback,
    StageChanged,
)

RULES = ("not finite", "collapse", "divergence")
BEFORE = 6
"""Epochs of losses shown before an alarm."""
SHORTLY = 3
"""Epochs in which a change of a blended seed is shown with an alarm."""


@dataclass
class Watch:
    """Listens to one controller's env."""

    controller: str
    chance: float
    env: GrowthVectorEnv = field(init=False)
    episodes: int = 0
    epochs: int = 0
    anomalies: int = 0
    rollbacks: Counter[str] = field(default_factory=Counter)
    ended: int = 0
    alarms: list[str] = field(default_factory=list)
    losses: dict[int, list[float]] = field(default_factory=dict)
    """By env, of the present episode, as the governor saw them, in units of chance."""
    changes: dict[int, list[StageChanged]] = field(default_factory=dict)

    def __call__(self, event: Event) -> None:
        if isinstance(event, StageChanged):
            self.changes.setdefault(event.env, []).append(event)
        elif isinstance(event, GovernorRollback):
            self.rollbacks[event.reason] += 1
            if event.reason == "divergence":
                self.anomalies += 1
            self._alarm(
                event.env,
                event.episode,
                event.epoch,
                event.reason,
                event.value,
                event.threshold,
            )
        elif isinstance(event, EpochCompleted):
            self.epochs += 1
            governor = self.env.local.hosts[event.env].governance.governor
            assert governor is not None
            if (
                governor.anomaly_pending
            ):  # one that has become a rollback is no longer pending
                self.anomalies += 1
                what = f"anomaly {governor.anomalies}"
                self._alarm(
                    event.env,
                    event.episode,
                    event.epoch,
                    what,
                    event.validation_loss,
                    math.nan,
                )
            self.losses.setdefault(event.env, []).append(
                event.validation_loss / self.chance
            )
        elif isinstance(event, EpisodeCompleted):
            self.episodes += 1
            self.ended += event.epochs < self.env.horizon
            self.losses[event.env] = []
            self.changes[event.env] = []

    def _alarm(
        self,
        env: int,
        episode: int,
        epoch: int,
        what: str,
        value: float,
        threshold: float,
    ) -> None:
        curve = " ".join(f"{loss:.2f}" for loss in self.losses.get(env, [])[-BEFORE:])
        changed = []
        for change in self.changes.get(env, []):
            on = "BLENDING" in (change.before, change.after)
            if (on or change.before == "HOLDING") and epoch - change.epoch <= SHORTLY:
                stages = f"{change.before}→{change.after}"
                changed.append(
                    f"{change.slot} {stages} at {change.epoch} ({change.cause})"
                )
        measured = f"{value / self.chance:.2f}" + (
            "" if math.isnan(threshold) else f" > {threshold / self.chance:.2f}"
        )
        self.alarms.append(
            f"| {self.controller} | {env} | {episode} | {epoch} | {what} | {curve} → {measured} | "
            f"{'; '.join(changed) or 'nothing'} |"
        )


def play(
    config: TrainingConfig, controllers: list[str], episodes: int, seed: int
) -> Iterator[Watch]:
    """Every controller on the same hosts, at least ``episodes`` of them each."""
    maker = EnvMaker.of(config)
    assert maker.task is not None
    chance = math.log(maker.task.classes)
    baseline = None
    for name in controllers:
        watch = Watch(name, chance)
        watch.env = env = GrowthVectorEnv(maker.task, maker.config, watch, baseline)
        env.configure(run_seed=seed)
        env.prepare()
        baseline = env.baseline
        player = make_controller(
            name, config.task.name, env.action_spec, env.layout, env.num_envs, seed
        )
        for number in range(math.ceil(episodes / env.num_envs)):
            play_round(env, player, seed if number == 0 else None)
        env.close()
        print(name, watch.episodes, dict(watch.rollbacks), watch.anomalies, flush=True)
        yield watch


def page(watches: list[Watch], command: str) -> str:
    lines = [
        "# False alarms of the governor",
        "",
        "Healthy hosts, default config, no injected faults; all controllers play the same hosts.",
        "",
        f"    {command}",
        "",
        "| controller | episodes | epochs | epochs with an anomaly | rollbacks: "
        + " | rollbacks: ".join(RULES)
        + " | episodes ended early |",
        "|" + "---|" * 8,
    ]
    for w in watches:
        counts = " | ".join(str(w.rollbacks[rule]) for rule in RULES)
        lines.append(
            f"| {w.controller} | {w.episodes} | {w.epochs} | {w.anomalies} | {counts} | {w.ended} |"
        )
    total: Counter[str] = Counter()
    alarms = []
    for w in watches:
        total["episodes"] += w.episodes
        total["epochs"] += w.epochs
        total["anomalies"] += w.anomalies
        total["rollbacks"] += w.rollbacks.total()
        alarms += w.alarms
    counted = ", ".join(f"{number} {what}" for what, number in total.items())
    lines += ["", f"In all: {counted}."]
    if alarms:
        lines += [
            "",
            f"Every alarm, with losses in units of chance (the last {BEFORE}, then the one that triggered it), and the",
            f"changes to blended seeds in the {SHORTLY} epochs before:",
            "",
            "| controller | env | episode | epoch | alarm | losses | blended seeds |",
            "|" + "---|" * 7,
            *alarms,
        ]
    lines += [
        "",
        "Made with:",
        "",
        *(f"    {line.strip()}" for line in summary_lines(paths=False)),
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", default="digits")
    parser.add_argument("--episodes", type=int, default=56, help="of each controller")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lanes", type=int, default=1)
    parser.add_argument(
        "--controllers", nargs="+", default=["none", "schedule", "heuristic", "random"]
    )
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    config = TrainingConfig.parse(
        {"task": {"name": arguments.task}, "run": {"lanes": arguments.lanes}}
    )
    watches = list(
        play(config, arguments.controllers, arguments.episodes, arguments.seed)
    )
    command = f"python benchmarks/governor_false_alarms.py --episodes {arguments.episodes} --out {arguments.out}"
    arguments.out.write_text(page(watches, command))


if __name__ == "__main__":
    main()
