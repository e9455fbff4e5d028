"""Cases of `end-to-end`: whole rounds of `esper run`, against the same hosts trained in plain eager PyTorch.

The run grows hosts on digits with an agent that learns: training with shadow losses, validation with counterfactuals,
decisions, the update, telemetry and checkpoints. The baseline only trains, so the ratio is an upper bound on the price
of growing, and there is no bar.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from esper.bench.plain import PlainTraining, plain_cnn
from esper.bench.request import BenchArgs, Size, SizeForm
from esper.bench.runner import BenchCase, waiting
from esper.config import TrainingConfig
from esper.data.task import Split, Task
from esper.data.tasks import load_task
from esper.run.experiment import Experiment
from esper.telemetry.event import Event, RoundCompleted

NAME = "end-to-end"
SIZE = SizeForm(("envs", "epochs"), "8x30")

DEFAULT_SIZES: tuple[Size, ...] = ((8, 30),)
_QUICK_SIZES: tuple[Size, ...] = ((2, 4),)
ROUNDS = 2
_TURNS = 3
_QUICK = 64  # samples per epoch


class RoundTimes:
    """A sink that sums the samples, epochs and seconds of a run's rounds, learning included."""

    def __init__(self) -> None:
        self.samples = self.epochs = 0
        self.seconds = 0.0

    def handle(self, event: Event) -> None:
        if isinstance(event, RoundCompleted):
            self.samples += event.samples
            self.epochs += event.epochs
            self.seconds += event.seconds

    def close(self) -> None:
        """Does nothing: it holds no resources."""


def run_rounds(envs: int, epochs: int, device: torch.device, samples: int | None) -> RoundTimes:
    """Runs an agent for a few rounds; the final comparison is minimal and not counted."""
    config = TrainingConfig.parse(
        {
            "run": {"device": str(device), "controller": "ppo", "rounds": ROUNDS, "evaluation_pairs": 1},
            "task": {"name": "digits", "samples_per_epoch": samples},
            "env": {"n_envs": envs, "episode_length": epochs, "baseline_episodes": 1},
            "ppo": {"practice_steps": 0},
        }
    )
    times = RoundTimes()
    with tempfile.TemporaryDirectory() as folder:
        Experiment(config, Path(folder) / "run", [times]).run()
    return times


def comparisons(request: BenchArgs) -> Iterator[BenchCase]:
    """Yields images per second, then env steps per second of the same runs; a step is one epoch of one host."""
    task = load_task("digits")
    for device in request.devices:
        for size in request.sizes or (_QUICK_SIZES if request.quick else DEFAULT_SIZES):
            yield from _at(size, device, task, _QUICK if request.quick else task.samples)


def _at(size: Size, device: torch.device, task: Task, samples: int) -> Iterator[BenchCase]:
    envs, epochs = size
    train = task.train
    assert isinstance(train, Split)
    hosts = [plain_cnn(1, task.classes, base=3, blocks=2, pool_last=False) for _ in range(envs)]
    data = Split(train.x[:samples], train.y[:samples]).to(device)
    plain = PlainTraining(hosts, data.x, data.y, task.batch_size)
    per_step = samples // task.batch_size * task.batch_size
    steps: dict[str, list[float]] = {"own": [], "plain": []}

    def ours() -> float:
        times = run_rounds(envs, epochs, device, samples)
        steps["own"].append(times.epochs / times.seconds)
        return times.samples / times.seconds

    epoch = waiting(plain.epoch, device)

    def alone() -> float:
        start = time.perf_counter()
        for _ in range(epochs):
            epoch()
        rate = envs * epochs / (time.perf_counter() - start)
        steps["plain"].append(rate)
        return rate * per_step

    label = f"digits, E {envs}, {epochs} epochs, {ROUNDS} rounds"
    baseline = f"{plain}; training only"
    yield BenchCase(f"{NAME}: esper run, ppo", label, device, baseline, ours, alone, None, "images/s", None, _TURNS)
    own, other = list(steps["own"]), list(steps["plain"])
    yield BenchCase(
        f"{NAME}: esper run, ppo", label, device, baseline, own.pop, other.pop, None, "env steps/s", None, len(own)
    )
