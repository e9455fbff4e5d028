"""Cases of `end-to-end`: whole rounds of `esper run`, against the same hosts trained in plain eager PyTorch.

The run grows hosts on digits with an agent that learns: training with shadow losses, validation with counterfactuals,
decisions, the update, telemetry and checkpoints. The baseline only trains, so the ratio is an upper bound on the price
of growing, and there is no bar.
"""

import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from esper.bench.case import BenchArgs, BenchCase, Sizes
from esper.bench.plain import PlainTraining, plain_cnn
from esper.config import TrainingConfig
from esper.data.split import Split
from esper.data.task import Task
from esper.data.tasks import load_task
from esper.files.run_folder import EVENTS
from esper.run.experiment import Experiment
from esper.telemetry.event import RoundCompleted
from esper.telemetry.event_log import EventLog

NAME = "end-to-end"
SIZES = Sizes(
    "ENVSxEPOCHS",
    ((8, 30),),
    quick=((2, 4),),
    seconds=240.0,
)

ROUNDS = 2
_TURNS = 3
_QUICK = 64  # samples per epoch


def run_rounds(envs: int, epochs: int, device: torch.device, samples: int) -> tuple[float, float]:
    """Runs an agent for a few rounds, with a minimal final comparison; returns :func:`rates`."""
    config = TrainingConfig.parse(
        {
            "run": {
                "device": str(device),
                "controller": "ppo",
                "rounds": ROUNDS,
                "evaluation_pairs": 1,
            },
            "task": {"name": "digits", "samples_per_epoch": samples},
            "env": {"n_envs": envs, "episode_length": epochs, "baseline_episodes": 1},
            "ppo": {"practice_steps": 0},
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        Experiment(config, run).run()
        return rates(run / EVENTS)


def rates(log: Path) -> tuple[float, float]:
    """Returns the images and the epochs per second of all rounds in an event log, learning included."""
    events, _ = EventLog(log).read()
    rounds = [event for event in events if isinstance(event, RoundCompleted)]
    seconds = sum(completed.seconds for completed in rounds)
    images = sum(completed.samples for completed in rounds)
    epochs = sum(completed.epochs for completed in rounds)
    return images / seconds, epochs / seconds


def comparisons(args: BenchArgs) -> Iterator[BenchCase]:
    """Yields images per second, then env steps per second of the same runs; a step is one epoch of one host."""
    task = load_task("digits")
    samples = task.samples
    if args.quick:
        samples = _QUICK
    for device, (envs, epochs) in SIZES.of(args):
        yield from _at(envs, epochs, device, task, samples)


def _at(
    envs: int,
    epochs: int,
    device: torch.device,
    task: Task,
    samples: int,
) -> Iterator[BenchCase]:
    train = task.train
    if not isinstance(train, Split) or task.classes is None:
        raise TypeError(f"{task.name} is not a task of images with classes")
    hosts = [plain_cnn(1, task.classes, base=3, blocks=2, pool_last=False) for _ in range(envs)]
    data = Split(train.x[:samples], train.y[:samples]).to(device)
    plain = PlainTraining(hosts, data, task.batch_size)
    images_per_step = samples // task.batch_size * task.batch_size

    # Env steps per second of the turns, which the second comparison takes out again.
    own_steps: list[float] = []
    other_steps: list[float] = []

    def ours() -> float:
        images, steps = run_rounds(envs, epochs, device, samples)
        own_steps.append(steps)
        return images

    def alone() -> float:
        start = time.perf_counter()
        for _ in range(epochs):
            plain.epoch()
        steps = envs * epochs / (time.perf_counter() - start)
        other_steps.append(steps)
        return steps * images_per_step

    images = BenchCase(
        case=f"{NAME}: esper run, ppo",
        size=f"digits, E {envs}, {epochs} epochs, {ROUNDS} rounds",
        device=device,
        baseline=f"{plain.name}; training only",
        run=ours,
        run_baseline=alone,
        unit="images/s",
        turns=_TURNS,
    )
    yield images
    yield replace(
        images,
        run=own_steps.pop,
        run_baseline=other_steps.pop,
        unit="env steps/s",
        turns=len(own_steps),
    )
