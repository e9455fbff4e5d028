"""Hosts that train on synthetic images, whose content does not affect speed."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import torch

from esper.config import TrainingConfig
from esper.core.state import Baseline
from esper.data.split import Split
from esper.data.task import Task
from esper.env.vector_env import GrowthVectorEnv, ignore
from esper.hosts.cnn import CNNHost
from esper.ops.stage_batch import normalisation_table
from esper.telemetry.event import Event

CHANNELS = 3
SIDE = 32
CLASSES = 10
BLOCKS = 3
VALIDATION = 2500
HORIZON = 75  # epochs of an episode, as in the task `cifar10`


def split(samples: int, seed: int, device: torch.device) -> Split:
    """Returns ``samples`` random uint8 images and their classes on ``device``."""
    generator = torch.Generator().manual_seed(seed)
    shape = (samples, SIDE, SIDE, CHANNELS)
    x = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    y = torch.randint(0, CLASSES, (samples,), generator=generator)
    table = normalisation_table([0.5] * CHANNELS, [0.25] * CHANNELS)
    return Split(x, y, table).to(device)


def image_task(
    samples: int,
    width: int,
    device: torch.device,
    validation: int = VALIDATION,
) -> Task:
    """Returns a task with hosts of three blocks, the first ``width`` channels wide, and ``samples`` training images."""
    return Task(
        name=f"synthetic images, {SIDE} x {SIDE}",
        classes=CLASSES,
        build_host=partial(
            CNNHost,
            CHANNELS,
            CLASSES,
            base=width,
            blocks=BLOCKS,
        ),
        train=split(samples, 0, device),
        validation=split(validation, 1, device),
        test=split(1, 2, device),
        precision="auto",
    )


def flat_baseline(horizon: int) -> Baseline:
    """Returns constant no-growth curves for envs whose rewards are not used, so that no baseline has to be measured."""
    accuracies = (100 / CLASSES,) * (horizon + 1)
    losses = (2.3,) * (horizon + 1)  # ln 10: hosts that guess
    return Baseline(accuracies, losses, 0.1, 1)


@contextmanager
def growth_env(
    task: Task,
    envs: int,
    batch: int,
    emit: Callable[[Event], None] = ignore,
    horizon: int = HORIZON,
    lanes: int | None = None,
    **settings: Any,
) -> Iterator[GrowthVectorEnv]:
    """Yields an env of ``envs`` hosts of ``task``, reset; closes it at the end.

    ``lanes`` hosts train at the same time, by default as many as there are physical cores; ``settings`` are further
    ones of the config's section task.
    """
    config = TrainingConfig.parse(
        {
            "run": {"device": task.device.type, "lanes": lanes},
            "task": {"batch_size": batch, "schedule": "constant", **settings},
            "env": {"n_envs": envs, "episode_length": horizon},
        }
    )
    with closing(GrowthVectorEnv(task, config, emit, flat_baseline(horizon))) as env:
        env.reset(seed=0)
        yield env
