"""Events for the tests of sinks; every value differs from the others."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from esper.core.action import HEADS
from esper.telemetry.event import (
    AnomalyDetected,
    Comparison,
    EpisodeCompleted,
    EpochCompleted,
    Event,
    PolicyUpdated,
    RoundCompleted,
    RunCompleted,
    RunStarted,
    SeedCut,
)
from esper.telemetry.span import PHASES

CLEANRL = {
    "charts/episodic_return",
    "charts/episodic_length",
    "charts/learning_rate",
    "charts/SPS",
    "losses/value_loss",
    "losses/policy_loss",
    "losses/entropy",
    "losses/approx_kl",
    "losses/clipfrac",
    "losses/explained_variance",
}
"""Tags that dashboards for CleanRL show."""
ANOMALY = AnomalyDetected(2, "value_wrong", None, -3.0, -1.0, "off", "lower it")
EPISODE = EpisodeCompleted(
    env=0,
    episode=0,
    epochs=30,
    total_reward=1.5,
    validation_accuracy=81.0,
    committed_accuracy=80.0,
    baseline_accuracy=78.5,
    host_parameters=277,
    fossil_parameters=0,
    fossils={},
    rollbacks=0,
    terminated=True,
    shapley={},
)
END = RunCompleted(
    "ppo",
    4,
    (Comparison("none", 85.0, 82.5, 2.5, 1.0, 4.0, 0.01, "better"),),
    277,
    300.0,
    1.0,
    9.0,
)


def read_events(path: str | Path) -> Iterator[dict[str, Any]]:
    """The records of an event log."""
    with Path(path).open() as log:
        yield from map(json.loads, log)


def cut(epoch: int, slot: str = "r0c1") -> SeedCut:
    return SeedCut(
        env=epoch % 4, episode=0, epoch=epoch, slot=slot, blueprint="conv_light"
    )


def completed(number: int, **changes: Any) -> RoundCompleted:
    """Round ``number`` of 10; values depend on it."""
    fields: dict[str, Any] = {
        "round": number,
        "rounds": 10,
        "episodes": 8,
        "mean_return": 0.5 * number,
        "committed_accuracy": 80.0 + number,
        "baseline_accuracy": 78.5,
        "test_accuracy": 79.0 + number,
        "alone_test_accuracy": 83.5,
        "fossils": 1.5,
        "rollbacks": number,
        "illegal_actions": 0,
        "epochs": 240,
        "samples": 1000 * number,
        "seconds": 10.0 * number,
        "epochs_per_second": 41.5,
        "images_per_second": 5230.4,
        "phase_seconds": {
            phase: number + index / 10 for index, phase in enumerate(PHASES)
        },
    }
    return RoundCompleted(**{**fields, **changes})


def started(**changes: Any) -> RunStarted:
    fields: dict[str, Any] = {
        "task": "digits",
        "controller": "ppo",
        "seed": 7,
        "rounds": 12,
        "n_envs": 8,
        "episode_length": 30,
        "host_parameters": 6418,
        "slots": ("r0c0", "r0c1"),
        "blueprints": ("conv_light", "norm"),
        "tier": "graph",
        "precision": "bfloat16",
        "micro_batches": 1,
        "tier_refused": None,
        "time": 0.0,
        "folder": "runs/a",
    }
    return RunStarted(**{**fields, **changes})


def updated(**changes: Any) -> PolicyUpdated:
    """An update; heads have entropies 0.1, 0.2, ..."""
    fields: dict[str, Any] = {
        **dict.fromkeys(
            (field.name for field in dataclasses.fields(PolicyUpdated)), 0.0
        ),
        "env_steps": 12800,
        "approx_kl": 0.0123,
        "clip_fraction": 0.08,
        "entropy": 2.5,
        "head_entropies": {head: (place + 1) / 10 for place, head in enumerate(HEADS)},
        "explained_variance": -0.5,
        "gradient_norm": 0.75,
        "learning_rate": 5e-4,
        "minibatches": 16,
        "stopped_early": False,
        "ratio_max": 1.5,
        "ratio_min": 0.5,
        "value_std": 1.0,
        "target_std": 1.25,
        "skipped_minibatches": 0,
        "broken_steps": 0,
        "choice_entropies": {
            head: (place + 1) / 10 for place, head in enumerate(HEADS)
        },
        "head_choices": dict.fromkeys(HEADS, 100),
    }
    return PolicyUpdated(**{**fields, **changes})


def epoch(env: int, number: int, episode: int = 0, **stages: str) -> EpochCompleted:
    """Epoch ``number`` of an env: 70 % for env 0, 72 % for env 1, ..., beside a baseline of 60 %."""
    return EpochCompleted(
        env=env,
        episode=episode,
        epoch=number,
        train_loss=1.0,
        train_accuracy=70.0,
        validation_loss=1.0,
        validation_accuracy=70.0 + 2 * env,
        committed_accuracy=65.0,
        baseline_accuracy=60.0,
        parameters=300,
        fossil_parameters=0,
        contributions={},
        stages=stages,
        reward=0.0,
        reward_terms={},
    )


def a_run(first: int = 1, last: int = 3) -> list[Event]:
    """Rounds of 240 env steps each, with an update after each."""
    events: list[Event] = []
    for number in range(first, last + 1):
        events += [
            cut(number),
            completed(number, rounds=last),
            updated(round=number, env_steps=240 * number),
        ]
    return events


def write(sink: Any, events: list[Event]) -> None:
    for event in events:
        sink.handle(event)
    sink.close()
