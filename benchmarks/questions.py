"""Widen, retrain, train on, adapt, or grow? The questions of benchmarks/questions.md.

    python -m benchmarks.questions tune upgrade digits
    python -m benchmarks.questions judge upgrade digits

`tune` trains each arm with each setting of its grid on hosts of their own, and writes the best of each, by validation
accuracy, to benchmarks/questions_rates.json. `judge` compares the arms with these settings on other hosts, and prints
the paired differences of test accuracies, grown hosts minus the others, with what each arm costs, as Markdown.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import benchmarks.adapters  # noqa: F401  registers the controls of both files
from benchmarks.timed import compared
from esper.compare.runner import HostResult
from esper.compare.statistics import compare_pairs, holm_adjusted
from esper.data.task import Task
from esper.data.tasks import load_task

HERE = Path(__file__).parent
RATES = HERE / "questions_rates.json"
GROWN = "grown"
TUNING_SEED, JUDGING_SEED = 100, 61_000
RATES_TRIED = (
    (0.125, 0.0),
    (0.25, 0.0),
    (0.5, 0.0),
    (1.0, 0.0),
    (2.0, 0.0),
    (1.0, 0.3),
)
"""Settings of an arm: learning rates in units of the task's own, and fractions of the epochs over which they rise."""
SEED_RATES = (
    (0.125, 8.0),
    (0.125, 16.0),
    (0.25, 4.0),
    (0.25, 8.0),
    (0.25, 16.0),
    (0.5, 4.0),
)
"""Settings of grown hosts, as many: rates of the host in units of the task's, and of seeds in units of the host's."""


@dataclass(frozen=True)
class Question:
    """A question on one task.

    ``arms`` are controls and controllers beside the grown hosts, by name, with what their configs have in common with
    nothing else.
    """

    task: str
    epochs: tuple[int, ...]
    """Episode lengths of grown hosts, which decide what all arms may compute."""
    arms: Mapping[str, str]
    slots: tuple[str, ...]
    """Slots in which seeds are planted from the first epoch on, one an epoch unless ``env`` allows more."""
    blueprint: str = "widen_whole"
    common: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the task that grown hosts have, and all arms that do not say otherwise."""
    growing: str = "schedule:SCHEDULE"
    """The controller of grown hosts; SCHEDULE stands for the file of the one that plants in all slots."""
    rounds: tuple[int, ...] = (0,)
    """Epochs at which the schedule plants in all slots."""
    env: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the env."""
    needs: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the controller ``need``."""
    seeds_have_rates: bool = True
    """Whether rates of seeds are tried beside those of the host."""


USUAL = {
    "continued": "same-compute",
    "retrained": "bigger-compute",
    "uniform": "uniform",
    "net2net": "net2net",
    "ensemble": "ensemble",
    "distilled": "distilled",
    "head only": "none,task.freeze=body",
}
ADAPTING = {
    "head only": "none,task.freeze=body",
    "uniform": "uniform",
    "scratch": "bigger-compute,task.freeze=nothing",
    "fine-tuned": "same-compute,task.freeze=nothing",
}
ADAPTING_TEXT = {**ADAPTING, "LoRA": "lora", "AdaLoRA": "adalora"}
FROZEN = {"freeze": "body"}
RANKS_BY_NEED = {
    "merge": True,
    "blueprints": ["lora_2"],
    "edits_per_epoch": 4,
    "need_every": 1,
    "parameter_budget": 0.133,
    "counterfactual_every": 10,
}
"""LoRAs of rank 2 that merge, at most as many parameters as rank 4 in all linear layers."""
TWO, THREE, LAST = ("r2c0", "r2c1"), ("r2c0", "r2c1", "r2c2"), ("r1c1",)
TASKS = f"{HERE / 'question_tasks.py'}:"
QUESTIONS: dict[tuple[str, str], Question] = {
    ("upgrade", "digits"): Question(f"{TASKS}digits_short", (4, 8, 12), USUAL, TWO),
    ("upgrade", "fashion"): Question(f"{TASKS}fashion_small", (6,), USUAL, THREE),
    ("late", "digits"): Question(f"{TASKS}digits_late", (10,), USUAL, TWO),
    ("late", "fashion"): Question(f"{TASKS}fashion_late", (6,), USUAL, THREE),
    ("adapt", "mnist"): Question(
        f"{TASKS}fashion_to_mnist", (30,), ADAPTING, THREE, common=FROZEN
    ),
    ("adapt", "code"): Question(
        f"{TASKS}chars_to_code", (10,), ADAPTING_TEXT, LAST, "widen_half", FROZEN
    ),
    ("ranks", "code"): Question(
        f"{TASKS}chars_to_code_loras",
        (10,),
        {
            "rank 2, then 4": "schedule:SCHEDULE,env.edits_per_epoch=8",
            "LoRA": "lora",
            "AdaLoRA": "adalora",
            "head only": "none",
        },
        tuple(f"r3c{number}" for number in range(8)),
        "lora_2",
        FROZEN,
        growing="need",
        rounds=(0, 2),
        env=RANKS_BY_NEED,
        needs={"threshold": 0.0},
        seeds_have_rates=False,
    ),
    ("adapt", "chars"): Question(
        f"{TASKS}code_to_chars", (10,), ADAPTING_TEXT, LAST, "widen_half", FROZEN
    ),
}


def schedule_of(question: Question, folder: Path) -> Path:
    """Writes the schedule by which hosts are grown; returns its file."""
    file = folder / "widen.toml"
    lines = (
        f'[[action]]\nepoch = {epoch}\nop = "GERMINATE"\nslot = "{slot}"\nblueprint = "{question.blueprint}"\n'
        for epoch in question.rounds
        for slot in question.slots
    )
    file.write_text("\n".join(lines))
    return file


def settings_of(
    question: Question, arm: str, rate: float, epochs: int
) -> list[dict[str, float]]:
    """Returns the settings of section task that are tried for an arm, six for each."""
    if arm == GROWN and question.seeds_have_rates:
        return [
            {"learning_rate": rate * own, "warmup_epochs": 0.0, "seed_rate": of_seeds}
            for own, of_seeds in SEED_RATES
        ]
    return [
        {
            "learning_rate": rate * factor,
            "warmup_epochs": warm_up * epochs,
            "seed_rate": 1.0,
        }
        for factor, warm_up in RATES_TRIED
    ]


def written(settings: Mapping[str, float]) -> str:
    return ",".join(f"task.{name}={value:.6g}" for name, value in settings.items())


def play(
    question: Question, task: Task, epochs: int, arms: list[str], pairs: int, seed: int
) -> tuple[dict[str, list[HostResult]], Mapping[str, float]]:
    """Plays arms beside the first of them; returns the hosts of each, and its seconds."""
    rows = sorted({slot.partition("c")[0] for slot in question.slots})
    base = {
        "task": {"name": task.name, "start": "trained", **question.common},
        "run": {"seed": seed},
        "env": {
            "episode_length": epochs,
            "baseline_episodes": 1,
            "n_envs": 8,
            "slots": rows,
            "at_once": True,
            **question.env,
        },
        "need": dict(question.needs),
    }
    with TemporaryDirectory() as folder:
        arms = [
            arm.replace("SCHEDULE", str(schedule_of(question, Path(folder))))
            for arm in arms
        ]
        return compared(arms, base, pairs, task, Path(folder))


def search(
    question: Question,
    task: Task,
    epochs: int,
    arm: str,
    text: str,
    first: str,
    pairs: int,
) -> dict[str, float]:
    """Plays an arm with each setting of its grid, beside the arm ``first``; returns the best by validation accuracy."""
    tried = settings_of(question, arm, task.learning_rate, epochs)
    arms = [
        f"{arm} {number}:controller={text},{written(each)}"
        for number, each in enumerate(tried)
    ]
    hosts, _ = play(question, task, epochs, [first, *arms], pairs, TUNING_SEED)
    scores = [
        float(
            np.mean(
                [
                    float(host.facts["validation_accuracy"])
                    for host in hosts[f"{arm} {number}"]
                ]
            )
        )
        for number in range(len(tried))
    ]
    best = tried[int(np.argmax(scores))]
    shown = " ".join(f"{score:.2f}" for score in scores)
    print(
        f"{task.name}, {epochs} epochs, {arm}: {shown}; best {written(best)}",
        flush=True,
    )
    return best


def tuned(name: tuple[str, str], lengths: tuple[int, ...], pairs: int) -> None:
    """Finds the settings of each arm, and writes them to RATES."""
    question = QUESTIONS[name]
    task = load_task(question.task)
    for epochs in lengths:
        growing = question.growing
        best = {
            GROWN: search(
                question, task, epochs, GROWN, growing, "alone:controller=none", pairs
            )
        }
        reference = f"{GROWN}:controller={growing},{written(best[GROWN])}"
        for arm, text in question.arms.items():
            best[arm] = search(question, task, epochs, arm, text, reference, pairs)
        known = (
            json.loads(RATES.read_text()) if RATES.exists() else {}
        )  # others may be tuned meanwhile
        known[f"{name[0]} {name[1]} {epochs}"] = best
        RATES.write_text(json.dumps(known, indent=2) + "\n")


def judged(name: tuple[str, str], lengths: tuple[int, ...], pairs: int) -> None:
    """Compares all arms with their settings, and prints the table."""
    question = QUESTIONS[name]
    task = load_task(question.task)
    rates = json.loads(RATES.read_text())
    for epochs in lengths:
        best = rates[f"{name[0]} {name[1]} {epochs}"]
        grown = f"{GROWN}:controller={question.growing},{written(best[GROWN])}"
        others = [
            f"{arm}:controller={text},{written(best[arm])}"
            for arm, text in question.arms.items()
        ]
        hosts, seconds = play(
            question,
            task,
            epochs,
            [grown, *others, "alone:controller=none"],
            pairs,
            JUDGING_SEED,
        )
        print(f"\n{name[0]}, {task.name}: {epochs} epochs of growth, {pairs} pairs\n")
        print(
            "| arm | test % | grown minus it | p | parameters | epochs | GFLOP | seconds a host |"
        )
        print("|---|---|---|---|---|---|---|---|")
        scores = {
            arm: np.array([host.accuracy for host in found])
            for arm, found in hosts.items()
        }
        compared = {
            arm: compare_pairs(scores[GROWN], scores[arm])
            for arm in scores
            if arm != GROWN
        }
        adjusted = dict(
            zip(
                compared,
                holm_adjusted([pair.p_value for pair in compared.values()]),
                strict=True,
            )
        )
        for arm, found in hosts.items():
            difference = p = ""
            if arm != GROWN:
                pair = compared[arm]
                difference = f"{pair.difference:+.2f} [{pair.interval.low:+.2f}, {pair.interval.high:+.2f}]"
                p = f"{adjusted[arm]:.2g}"
            means = [
                np.mean([getattr(host, each) for host in found])
                for each in ("parameters", "epochs", "flops")
            ]
            print(
                f"| {arm} | {scores[arm].mean():.2f} | {difference} | {p} | {means[0]:.0f} | {means[1]:.1f} | "
                f"{means[2] / 1e9:.3f} | {seconds[arm] / pairs:.1f} |",
                flush=True,
            )


def main() -> None:
    """Tune or judge one question on one task."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=("tune", "judge"))
    parser.add_argument(
        "question", choices=sorted({question for question, _ in QUESTIONS})
    )
    parser.add_argument("task", choices=sorted({task for _, task in QUESTIONS}))
    parser.add_argument("--pairs", type=int, help="hosts; 16 to tune, 40 to judge")
    parser.add_argument(
        "--epochs",
        type=int,
        action="append",
        help="of growth; all of the question by default",
    )
    options = parser.parse_args()
    name = (options.question, options.task)
    lengths = tuple(options.epochs or QUESTIONS[name].epochs)
    if options.what == "tune":
        tuned(name, lengths, options.pairs or 16)
    else:
        judged(name, lengths, options.pairs or 40)


if __name__ == "__main__":
    main()
