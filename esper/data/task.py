"""A task: a host, three disjoint splits of data, and default sizes."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel
from torch import Tensor
from torch.utils.data import Dataset

from esper.config import ConfigError, Optimizer, Precision, TaskConfig, TrainingConfig
from esper.config.files import at_home
from esper.config.resolved import HostTrainingConfig, ResolvedEnv, ResolvedTask
from esper.data.facts import TaskFacts, check_training
from esper.data.objective import ClassObjective, Objective, PerSample, make_objective
from esper.data.split import SAMPLE, Split, StreamedSplit
from esper.hosts.host import Host
from esper.hosts.inputs import stack
from esper.telemetry import html
from esper.telemetry.score import ScoreUnit

MAX_CLASSES = 100
"""Max classes of which reports have the accuracy of each."""


def default_folder() -> Path:
    """Returns the folder in the environment variable ``ESPER_DATA``, or ``~/.cache/esper``, also without a home."""
    return Path(os.path.expanduser(os.environ.get("ESPER_DATA") or "~/.cache/esper"))


@dataclass(frozen=True)
class DataOptions:
    """The data folder, and whether missing data may be downloaded."""

    folder: Path = field(default_factory=default_folder)
    download: bool = False

    @classmethod
    def of(cls, config: TaskConfig) -> DataOptions:
        folder = default_folder() if config.data is None else at_home(config.data)
        if config.download:
            folder = at_home(folder)
        return cls(folder, config.download)


@dataclass(frozen=True)
class Augmentation:
    """Random, label-preserving changes to a training image each time it is used."""

    crop: int = 0
    """Number of zero pixels added on every side before a random window of the image's size is cut out; 0: no crop."""
    flip: bool = False
    """Whether half of the images, chosen at random, are mirrored left to right."""


@dataclass(frozen=True)
class Task:
    """The data, the host and the default sizes of a problem.

    Rewards, gates and the governor see the validation split only; only reports read the test split.

    Raises ConfigError for splits that cannot be trained on.
    """

    name: str
    classes: int | None
    """Size of the last dimension of the logits: the number of image classes, or the vocabulary of a text. None if the
    targets are not classes."""
    build_host: Callable[[], Host]
    """Makes a new host; initial weights drawn from torch's generator differ between episodes."""
    train: Split | Dataset[tuple[Tensor, Tensor]]
    """In memory, or a map-style dataset of samples (x, y) with equal shapes, which workers read."""
    validation: Split
    """In memory; a map-style dataset becomes a ``StreamedSplit``, which reads it batch by batch."""
    test: Split
    description: str = ""
    learning_rate: float = 0.05
    warmup_epochs: float = 0.0
    """Epochs over whose steps the learning rate rises from near zero."""
    optimizer: Optimizer = "sgd"
    """Optimizer of hosts and seeds: sgd or adamw."""
    weight_decay: float = 5e-4
    label_smoothing: float = 0.0
    """Share of a target that training spreads evenly over all classes, see ``TaskConfig.label_smoothing``."""
    batch_size: int = 64
    samples_per_epoch: int | None = None
    """Samples that each env draws per epoch; None: the whole training split."""
    n_envs: int = 8
    episode_length: int = 30
    slots: tuple[str, ...] | None = None
    """Slots that a run uses, see ``EnvConfig.slots``; None: those that ``build_host`` gives its hosts."""
    at_once: bool = False
    """Whether seeds that change nothing at first are a part of their host at once, see ``EnvConfig.at_once``."""
    rounds: int = 4
    """Number of rounds of a run."""
    learning_rounds: int = 20
    """The same for an agent that learns."""
    evaluation_batch: int = 500
    """Samples per evaluation batch; features of much larger batches do not fit in the caches and take twice as long."""
    workers: int = 2
    """Number of processes that read training data which is not in memory."""
    augmentation: Augmentation = Augmentation()
    """Augmentation of training images that are stored as bytes."""
    origin: Callable[[], Host] | None = None
    """Makes the host with new weights, if hosts start from others, see ``TaskConfig.start``."""
    trained: bool = False
    """Whether the hosts of ``origin`` are trained alone before an episode starts from them."""
    earlier: Task | None = None
    """The task that hosts are trained on before, if ``TaskConfig.start`` is trained, such as the part of the data that
    was there; its host has equal layers. None: this task."""
    transfer: Callable[[Host, Host], None] | None = None
    """Gives a host of ``build_host``, its second argument, the function of a trained one of ``origin``; None: the
    latter's weights are copied."""
    precision: Precision = "float32"
    """Precision of forward and backward passes, see ``TaskConfig.precision``."""
    loss: str | PerSample = "cross_entropy"
    """The loss that steps minimise: ``cross_entropy``, ``mse``, ``bce`` (binary cross-entropy of logits), or a function
    of a network's outputs [N, ...] and the targets [N, ...] that returns one value per sample, [N], or several,
    [N, ...], whose mean counts."""
    score: str | PerSample | None = None
    """The score that growth is to raise: ``accuracy``, ``r2``, or a function as for ``loss``. None: accuracy, and r2
    with mse."""
    score_name: str | None = None
    """The name of the score in reports; None: its name, or that of its function."""
    score_unit: str = ""
    """Unit of the score in reports, such as "K"; empty for none."""
    points: float = 100.0
    """Percentage points in a unit of the score, so that scores span about 100 of them: 100 for a score from 0 to 1.
    Gates, rewards and controllers compare percentage points."""

    def __post_init__(self) -> None:
        for name in ("validation", "test"):
            self._stream(name)
        for name, split in self._splits().items():
            split.check(f"{self.name}, {name} split", self.classes)
        if not (math.isfinite(self.points) and self.points > 0):
            raise ConfigError(f"{self.name}: points is {self.points}; it must be positive")
        try:
            self.objective  # noqa: B018  # made now, because it may be refused
        except ConfigError as error:
            raise ConfigError(f"{self.name}: {error}") from None
        if not self.samples:
            raise ConfigError(f"{self.name}, train split: it has no samples")
        if self.augmentation != Augmentation():
            self._check_augmentation()

    def __repr__(self) -> str:
        return f"Task({self.name}: {', '.join(f'{count:,} {part}' for part, count in self._counts().items())} samples)"

    def _repr_html_(self) -> str:
        rows: list[tuple[str, object]] = [("data", self.description)] if self.description else []
        rows += [(f"{part} samples", count) for part, count in self._counts().items()]
        if self.classes is not None:
            rows.append(("classes", self.classes))
        rows += [
            ("score", self.score_shown.name),
            ("epochs", self.episode_length),
            ("batch", self.batch_size),
            ("learning rate", f"{self.optimizer}, {self.learning_rate:g}"),
        ]
        return html.table((f"task {self.name}", ""), rows)

    def _counts(self) -> dict[str, int]:
        return {"training": self.samples, "validation": len(self.validation), "test": len(self.test)}

    def _check_augmentation(self) -> None:
        """Raises ConfigError unless the training images and their targets can be augmented."""
        if not isinstance(self.train, Split) or self.train.table is None:
            raise ConfigError(f"{self.name}: augmentation needs uint8 training images with a table")
        if self.train.y.dim() > 2:
            raise ConfigError(
                f"{self.name}: augmentation moves images, but not targets of shape {tuple(self.train.y.shape)}; use a "
                "Dataset that changes both"
            )
        side = min(self.train.x.shape[1:3])
        crop = self.augmentation.crop
        if not 0 <= crop < side:
            raise ConfigError(f"{self.name}: crop is {crop}; for images of this size it must be 0 to {side - 1} pixels")

    def _stream(self, name: str) -> None:
        """Makes a split of a map-style dataset, which is read while hosts are measured."""
        data = getattr(self, name)
        if isinstance(data, Split):
            return
        split = StreamedSplit.of(data, f"{self.name}, {name} split", self.classes)
        object.__setattr__(self, name, split)  # the class is frozen

    def _splits(self) -> dict[str, Split]:
        """Returns the splits, by name; not a training set that is streamed."""
        splits = {"validation": self.validation, "test": self.test}
        if isinstance(self.train, Split):
            return {"train": self.train, **splits}
        return splits

    @cached_property
    def objective(self) -> Objective:
        """The loss and the score of samples."""
        return make_objective(self.loss, self.score, self.classes, self.validation.y)

    @cached_property
    def counts(self) -> NDArray[np.float64]:
        """Number of targets in each validation sample, float64 [N]."""
        return self.objective.counts(self.validation.y)

    @cached_property
    def labels(self) -> NDArray[np.int64] | None:
        """Class of each validation sample, int64 [N]; None if samples have several or none, if they are not scored by
        accuracy, or if there are more than ``MAX_CLASSES``."""
        y = self.validation.y
        scored = isinstance(self.objective, ClassObjective) and (self.classes or 0) <= MAX_CLASSES
        if not scored or y.dim() != 1:
            return None
        return np.asarray(y.cpu())

    @property
    def guessed(self) -> int | None:
        """Number of classes, if ln of it is the loss of a guess: if the loss is cross-entropy."""
        return self.classes if self.loss == "cross_entropy" else None

    @property
    def score_shown(self) -> ScoreUnit:
        """Display format of the score in reports: accuracy in per cent, others in a unit of their own."""
        score = self.score
        if not score:
            score = "r2" if self.loss == "mse" else "accuracy"
        name = self.score_name
        if not name:
            name = score if isinstance(score, str) else str(getattr(score, "__name__", "score"))
        if score == "accuracy" and self.points == 100 and not self.score_unit:
            return ScoreUnit(name)
        if name == "<lambda>":
            name = "score"
        return ScoreUnit(name, self.score_unit, self.score_unit, self.points)

    @property
    def samples(self) -> int:
        """Number of training samples."""
        return len(self.train)  # type: ignore[arg-type]

    def calibration_inputs(self, count: int = 256) -> Any:
        """Returns the first training inputs, at most ``count``, on the task's device."""
        count = min(count, self.samples)
        if isinstance(self.train, Split):
            return self.train.inputs(0, count)
        samples = [self.train[row][0] for row in range(count)]
        return stack(samples).to(self.device)

    @property
    def device(self) -> torch.device:
        """Device of the data in memory, on which hosts train."""
        return self.validation.y.device

    def to(self, device: torch.device) -> Task:
        """Returns the same task with its in-memory splits on ``device``."""
        earlier = self.earlier
        if earlier is not None:
            earlier = earlier.to(device)
        splits = {name: split.to(device) for name, split in self._splits().items()}
        return replace(self, earlier=earlier, **splits)  # type: ignore[arg-type]

    def with_hosts(self, build_host: Callable[[], Host]) -> Task:
        """Returns the same task with the hosts that ``build_host`` makes, which are trained first if its own are."""
        origin = build_host if self.trained else self.origin
        return replace(self, build_host=build_host, origin=origin)

    def from_new_weights(self) -> Task:
        """Returns the same task with hosts that have new weights."""
        return replace(
            self,
            build_host=self.origin or self.build_host,
            origin=None,
            trained=False,
            transfer=None,
        )

    def new_host(self, slots: Sequence[str] | None = None) -> Host:
        """Makes a host with the slots that ``slots`` names, see ``EnvConfig.slots``; None: those that ``build_host``
        gives it.

        Raises ConfigError for another thing than a host, or for slots that it cannot have.
        """
        host = self.build_host()
        if not isinstance(host, Host):
            raise ConfigError(f"{self.name}: build_host makes a {type(host).__name__}, not a host; see esper.graft")
        if slots is not None:
            try:
                host.use_slots(slots)
            except ConfigError as error:
                raise ConfigError(f"env.slots: {error}") from None
        return host

    @property
    def sample(self) -> Any:
        """A few validation inputs, on which networks are tried."""
        return self.validation.inputs(0, SAMPLE)


def resolve(config: TrainingConfig, task: Task) -> HostTrainingConfig:
    """Returns the config with the task's defaults in place of None.

    Raises ConfigError for a batch or an epoch that the data cannot fill, for more micro-batches than samples, and for
    settings that do not suit the optimizer.
    """
    check_training(config.task, facts_of(task))
    training = _filled(config.task, task, ResolvedTask)
    training["samples_per_epoch"] = training["samples_per_epoch"] or task.samples
    env = _filled(config.env, task, ResolvedEnv)
    rounds = task.learning_rounds if config.run.learns else task.rounds
    run = {"rounds": config.run.rounds or rounds}
    tables = config.tables_with({"task": training, "env": env, "run": run})
    return HostTrainingConfig.parse(tables)


def facts_of(task: Task) -> TaskFacts:
    """Returns what a config has to suit."""
    return TaskFacts(
        name=task.name,
        samples=task.samples,
        n_envs=task.n_envs,
        batch_size=task.batch_size,
        samples_per_epoch=task.samples_per_epoch,
        optimizer=task.optimizer,
        learning_rate=task.learning_rate,
        label_smoothing=task.label_smoothing,
        smooths=task.objective.smooths,
    )


def _filled(section: BaseModel, task: Task, resolved: type[BaseModel]) -> dict[str, Any]:
    """Returns the fields that ``resolved`` requires, as ``section`` sets them; the task's default in place of None."""
    values: dict[str, Any] = {}
    for name, field_info in resolved.model_fields.items():
        if not field_info.is_required():
            continue
        values[name] = getattr(section, name)
        if values[name] is None:
            values[name] = getattr(task, name)
    return values
