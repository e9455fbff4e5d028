"""Facts of tasks that a config has to suit, checked without loading torch or data, which takes seconds.

The facts of the tasks that come with Esper are listed here; those of a user's task are known once it is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from esper.config import ConfigError, Optimizer, TaskConfig, TrainingConfig
from esper.config.files import at_home
from esper.config.task import NEW, TRAINED
from esper.core.chosen import choose_blueprints, choose_slots
from esper.core.sizing import SIZING, WIDENINGS
from esper.data.names import DRAWN, ENV_ONLY, SIMULATED

IN_CNNS = ("norm", "attention", "conv_small", "bottleneck", "depthwise", "conv_light", "conv_heavy")
IN_MLPS = ("norm", "lora", "lora_large", "mlp_small", "mlp")
AFTER_BLOCKS = ("norm", "lora", "lora_large", "attention", "mlp_small", "mlp", "stack", "repeat", "empty")
WIDER = ("widen_quarter", "widen_half", *WIDENINGS.values())
BESIDE_LAYERS = ("lora_2", "lora_8", "lora_32")

DRAWN_NEEDS: Mapping[str, Mapping[str, Any]] = {
    # Without a discount, rewards add up to what is judged: accuracy minus price.
    "reward": {"gamma": 1.0},
    "governor": {"snapshot_every": 5},  # each takes as long as the epoch of such a small host
    "run": {"evaluation_pairs": 64},
    "ppo": {
        "gamma": 1.0,
        "gae_lambda": 1.0,
        "prior": 0.0,
        "entropy_start": 0.01,
    },
}
"""Values in the place of defaults if hosts are drawn for each episode."""


@dataclass(frozen=True)
class TaskFacts:
    """The sizes and settings that a task has by default."""

    name: str
    samples: int | None
    """Number of training samples; None: they are counted when the task is loaded."""
    n_envs: int = 4
    batch_size: int = 64
    samples_per_epoch: int | None = None
    """None: all samples."""
    optimizer: Optimizer = "sgd"
    learning_rate: float = 0.05
    label_smoothing: float = 0.0
    smooths: bool = True
    """Whether labels can be smoothed."""


@dataclass(frozen=True)
class SlotFacts:
    """The slots of a task's hosts, and what can be planted there."""

    kind: str
    """The hosts in words."""
    slots: Mapping[str, tuple[str, ...]]
    """Blueprints by slot, also those that fit only in a wider layer."""
    default: tuple[str, ...] = ("all",)
    """Names of the slots that a run uses by default."""


def grid(**rows: tuple[int, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Returns blueprints by slot, from the number of columns and the blueprints of each row."""
    slots = {}
    for row, (columns, blueprints) in rows.items():
        for column in range(columns):
            slots[f"{row}c{column}"] = blueprints
    return slots


def cnn(*columns: int, default: tuple[str, ...] = ("r0", "r1")) -> SlotFacts:
    """Returns the facts of a CNNHost with these numbers of slots in its three rows."""
    rows = zip(("r0", "r1", "r2"), columns, (IN_CNNS, IN_CNNS, WIDER), strict=True)
    return SlotFacts("cnn", grid(**{row: (count, names) for row, count, names in rows}), default)


def transformer(blocks: int) -> SlotFacts:
    """Returns the facts of a TransformerHost."""
    slots = grid(r0=(blocks, AFTER_BLOCKS), r1=(blocks, WIDER), r2=(blocks, WIDER), r3=(blocks, BESIDE_LAYERS))
    return SlotFacts("transformer", slots, ("r0",))


KNOWN: dict[str, TaskFacts] = {
    facts.name: facts
    for facts in (
        TaskFacts("digits", 997, 8, 64, 997, learning_rate=0.4, label_smoothing=0.1),
        TaskFacts("digits_table", 997, 8, 64, 997, "adamw", 0.03, 0.1),
        TaskFacts("mnist5k", 3_000, 4, 64, 1_000, "adamw", 0.03, 0.1),
        TaskFacts("chars", 5_814, 4, 8, 1_000, "adamw", 0.006),
        TaskFacts("code", None, 4, 8, 1_000, "adamw", 0.006),
        TaskFacts("cifar10", 45_000, 8, 128, 45_000),
        TaskFacts("resnet18_cifar10", 45_000, 8, 128, 45_000),
        TaskFacts("cifar100", 45_000, 8, 128, 45_000),
        TaskFacts("fashion_mnist", 55_000, 4, 64, 5_000, "adamw", 0.1, 0.1),
        TaskFacts("tinystories", None, 2, 16, None, "adamw", 0.001),
    )
}
HOSTS: dict[str, SlotFacts] = {
    "digits": cnn(2, 1, 2, default=("all",)),
    "digits_table": SlotFacts("mlp", grid(r0=(2, IN_MLPS), r2=(2, WIDER))),
    "mnist5k": cnn(3, 3, 3),
    "chars": transformer(2),
    "code": transformer(2),
    "cifar10": cnn(3, 3, 3),
    "resnet18_cifar10": SlotFacts("cnn", grid(r0=(4, IN_CNNS))),
    "cifar100": cnn(3, 3, 3),
    "fashion_mnist": cnn(3, 3, 3, default=("all",)),
    "tinystories": transformer(3),
    "planted": SlotFacts("simulated", grid(r0=(3, ("moss", "fern", "oak", "ivy")))),
}
BEST_HOST = "best_host"
"""Name of the best host in a run folder."""
FORMS = (
    f"{NEW}; {TRAINED}, each host trained alone first; a run folder, for its best host; a saved host, by the path of "
    "its two files; or a file of weights of the task's host, .safetensors or .pt"
)
"""Forms of ``task.start``."""
N_ENVS = 64
"""Default number of hosts that are simulated or drawn."""


def check_known(config: TrainingConfig, own_code: bool = False, processes: int | None = None) -> None:
    """Raises ConfigError for values that contradict the facts of the task, if it comes with Esper, or each other.

    Args:
        config: the config of a run or of an arm.
        own_code: whether code of a user is to run, which may register blueprints.
        processes: the number that hosts are spread over; None: one.
    """
    name = config.task.name
    if name in DRAWN:
        config = for_drawn(config)
    if name in HOSTS:
        _check_names(config, HOSTS[name], own_code)
    if config.task.start not in (NEW, TRAINED):
        weights_file(config.task.start)
    n_envs = config.env.n_envs
    if name in KNOWN:
        check_training(config.task, KNOWN[name])
        n_envs = n_envs or KNOWN[name].n_envs
    elif name in ENV_ONLY:
        n_envs = n_envs or N_ENVS
    if config.run.learns:
        check_learning(config, n_envs)
    if processes is not None and processes > 1:
        check_processes(name, processes, n_envs)


def _check_names(config: TrainingConfig, hosts: SlotFacts, own_code: bool) -> None:
    chosen = hosts.default if config.env.slots is None else config.env.slots
    slots = slots_of(chosen, tuple(hosts.slots))
    if config.env.blueprints is None or own_code:
        return
    offered = dict.fromkeys(name for slot, names in hosts.slots.items() if slot in slots for name in names)
    everywhere = {name for names in hosts.slots.values() for name in names}
    choose_blueprints(
        config.env.blueprints,
        tuple(offered),
        f"{hosts.kind} hosts",
        lambda name: f"env.slots are {', '.join(chosen)}" if name in everywhere else None,
    )


def slots_of(names: tuple[str, ...], possible: tuple[str, ...]) -> set[str]:
    """Returns the slots that ``env.slots`` stands for. Raises ConfigError for others than those that are possible."""
    try:
        return choose_slots(names, possible)
    except ConfigError as error:
        raise ConfigError(f"env.slots: {error}") from None


def weights_file(start: str) -> Path:
    """Returns the file of weights that ``task.start`` names. Raises ConfigError if the file does not exist."""
    path = at_home(start)
    saved = [path, path / BEST_HOST]
    if path.suffix == ".json":
        # The description of a saved host names its weights, too.
        saved.append(path.with_suffix(""))
    for file in (path, *(host.with_name(f"{host.name}.safetensors") for host in saved)):
        if file.is_file() and file.suffix != ".json":
            return file
    raise ConfigError(f"task.start is {start!r}, where no weights are; give one of: {FORMS}")


def check_training(chosen: TaskConfig, task: TaskFacts) -> None:
    """Raises ConfigError for a batch or an epoch that the data cannot fill, for more micro-batches than samples, and
    for settings that do not suit the optimizer."""
    samples = chosen.samples_per_epoch or task.samples_per_epoch or task.samples
    batch = chosen.batch_size or task.batch_size
    smoothing = task.label_smoothing if chosen.label_smoothing is None else chosen.label_smoothing
    if samples and task.samples and samples > task.samples:
        raise ConfigError(f"task.samples_per_epoch is {samples}, but {task.name} has {task.samples} training samples")
    if chosen.micro_batches > batch:
        raise ConfigError(f"task.micro_batches is {chosen.micro_batches}, more than the {batch} samples of a batch")
    if samples and batch > samples:
        raise ConfigError(f"task.batch_size is {batch}, larger than the {samples} samples of an epoch of {task.name}")
    if chosen.optimizer not in (None, task.optimizer) and chosen.learning_rate is None:
        raise ConfigError(
            f"task.optimizer is {chosen.optimizer}, but the learning rate of {task.name}, {task.learning_rate:g}, is "
            f"for {task.optimizer}: set task.learning_rate, too (for adamw, values near 0.003 are usual)"
        )
    if (chosen.optimizer or task.optimizer) == "adamw" and max(chosen.momentum, chosen.beta2) == 1:
        raise ConfigError("with adamw, task.momentum and task.beta2 must be below 1: means would never move")
    if smoothing and not task.smooths:
        raise ConfigError(
            f"task.label_smoothing is {smoothing:g}, but labels are smoothed only with the loss cross_entropy and the "
            f"score accuracy; {task.name} needs 0"
        )


def check_processes(task: str, processes: int, n_envs: int | None) -> None:
    """Raises ConfigError if hosts of a task cannot be spread over that many processes."""
    if task in SIMULATED:
        raise ConfigError(f"the hosts of {task} are in one process, and not spread over ranks")
    if n_envs is not None and processes > n_envs:
        raise ConfigError(f"a round has {n_envs} hosts (env.n_envs) for {processes} ranks: use at most {n_envs}")


def check_learning(config: TrainingConfig, n_envs: int | None) -> None:
    """Raises ConfigError for values that contradict each other in any run of an agent; None: ``n_envs`` is not known
    yet."""
    if config.ppo.gamma != config.reward.gamma:
        raise ConfigError(
            f"ppo.gamma is {config.ppo.gamma} and reward.gamma is {config.reward.gamma}: they must be equal, or the "
            f"potential terms of the reward change which policy is optimal"
        )
    if n_envs is None:
        return
    episodes = config.ppo.episodes_per_update
    if episodes is not None and episodes % n_envs:
        raise ConfigError(
            f"ppo.episodes_per_update is {episodes}, but a round has {n_envs} episodes (env.n_envs): "
            f"use a multiple of {n_envs}"
        )
    group = config.ppo.group or 1
    if group > 1 and (n_envs % group or episodes not in (None, n_envs)):
        raise ConfigError(
            f"ppo.group is {group}: env.n_envs, here {n_envs}, must be a multiple of it, and ppo.episodes_per_update "
            "be omitted"
        )


def for_drawn(config: TrainingConfig) -> TrainingConfig:
    """Returns the config with the values of hosts that are drawn for each episode in the place of defaults.

    Raises ConfigError for other blueprints and rewards than such hosts have, and for a GPU.
    """
    name = ", ".join(DRAWN)
    config = config.with_defaults(**SIZING).with_defaults(**DRAWN_NEEDS)
    offered = tuple(WIDENINGS.values())
    others = [blueprint for blueprint in config.env.blueprints or () if blueprint not in offered]
    if others or config.reward.mode != "priced":
        raise ConfigError(
            f"hosts of the task {name} are widened, by {', '.join(offered)}, and pay their price (reward.mode=priced); "
            f"not {', '.join(others) or config.reward.mode}"
        )
    devices = config.run.device
    if not re.fullmatch(r"auto|cpu(\s*,\s*cpu)*", devices):
        raise ConfigError(f"run.device is {devices}, but hosts of the task {name} train on the CPU: omit it")
    return config
