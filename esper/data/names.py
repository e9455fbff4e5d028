"""Names of the tasks that come with Esper, known without loading torch."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from esper.agents.spec import FORM, ControllerSpec
from esper.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from esper.config import TrainingConfig

SIMULATED: dict[str, str] = {
    "planted": "simulated hosts under a known law, to try controllers on; 64 envs, no data",
}
"""Descriptions of tasks with simulated hosts: they have an env (``esper.env.make``) and no data to load."""

DRAWN: dict[str, str] = {
    "varied": "networks that differ in data, size, length, rate and price, drawn for each episode; 64 envs",
}
"""Descriptions of tasks whose hosts and data are drawn for each episode; they have an env only, too."""

DRAWN_VALUES = "env.episode_length and env.slots are drawn for each episode of the task {task}: omit them"
ENV_ONLY = {**SIMULATED, **DRAWN}
LEARNED_ON = "varied"
"""Task of runs in which an agent learns and that name no task."""

NAMES = (
    "digits",
    "digits_table",
    "mnist5k",
    "chars",
    "code",
    "cifar10",
    "resnet18_cifar10",
    "cifar100",
    "fashion_mnist",
    "tinystories",
    *ENV_ONLY,
)


def require_task(name: str) -> None:
    """Raises ConfigError for a name that no task has, with the known ones, and for that of a file that is not there."""
    if name not in NAMES and ":" not in name and not name.endswith(".py"):
        similar = did_you_mean(name, NAMES)
        raise ConfigError(f"unknown task {name!r}{similar}; known: {', '.join(NAMES)}, or a file: {FORM}")
    ControllerSpec.of(name).require_there()


def require_data(name: str) -> None:
    """Raises ConfigError as :func:`require_task` does, and for a task that has an env only."""
    require_task(name)
    if name in ENV_ONLY:
        lacks = "is simulated" if name in SIMULATED else "draws its hosts for each episode"
        raise ConfigError(
            f"task {name!r} {lacks}: it has no data and no network. Its env comes from esper.env.make.make_env. "
            f"Tasks with data: {', '.join(known for known in NAMES if known not in ENV_ONLY)}"
        )


def require_read(config: TrainingConfig, given: Collection[str] = ()) -> None:
    """Raises ConfigError for values that hosts without data of a task do not read.

    Args:
        config: what the task and the values of its section are read from.
        given: values that a command names, as SECTION.KEY. Those of a run's own config may be drawn ones.
    """
    if config.task.name not in ENV_ONLY:
        return
    unread = config.task.model_dump(exclude_defaults=True).keys() - {"name", "precision"}
    if unread:
        raise ConfigError(
            f"task.{', task.'.join(sorted(unread))}: the task {config.task.name} has hosts and training of its own, "
            "and reads no such value; name another task, for example --task digits"
        )
    if config.task.name in DRAWN and not {"env.episode_length", "env.slots"}.isdisjoint(given):
        raise ConfigError(DRAWN_VALUES.format(task=config.task.name))
