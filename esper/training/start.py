"""Hosts that are trained alone, to their limit, before an episode starts from them."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import warnings
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from importlib import metadata
from itertools import chain
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from esper.config import ConfigError, HostTrainingConfig, TrainingConfig
from esper.data.split import SAMPLE, Split
from esper.data.task import DataOptions, Task, resolve
from esper.files.atomic import write_atomic
from esper.hosts.grown import GrownHost
from esper.hosts.host import Host
from esper.hosts.inputs import as_inputs, tensors_of
from esper.training.executor import Executor
from esper.training.host_trainer import HostTrainer
from esper.training.host_training import HostTraining
from esper.training.metrics import finite_buffers, make_metrics
from esper.training.rng import RngStream, derive_seed, is_held_out, seeded
from esper.training.step import add_gradients, prepare_epoch
from esper.training.validate import all_off, evaluate

logger = logging.getLogger(__name__)

Weights = dict[str, Tensor]
"""All parameters and buffers of a host by name, on the CPU."""

MIN_GAIN = 0.2
"""A host is at its limit if training it on gains less than this on validation, pp."""
MAX_RESTARTS = 6
FIRST_INDEX = 2_000_000
"""Added to the index of a host for the one that it starts from: streams of random numbers that no other host shares."""


def give_starts(hosts: Sequence[HostTraining], executor: Executor) -> None:
    """Gives new hosts the weights of hosts that were trained alone, to their limit.

    An env of a run starts all its episodes from the same weights. Held-out hosts have weights of their own in every
    episode, so that pairs are independent. Weights are kept in the folder of data, under ``starts``, and
    are not trained twice.
    """
    starts = list(map(_untrained, hosts))
    files = list(map(_file_of, starts))
    known = list(map(_read, files))
    missing = [start for start, weights in zip(starts, known, strict=True) if weights is None]
    trained: list[Weights] = []
    if missing:
        first = missing[0]
        logger.warning(
            "%d hosts of %s are trained alone first, for %d epochs or more: task.start is trained; kept in %s",
            len(missing),
            first.task.name,
            first.horizon * 3 // 2,
            files[0].parent,
        )
        trained = _train_to_limit(missing, executor)
    remaining = iter(trained)
    for host, file, weights in zip(hosts, files, known, strict=True):
        if weights is None:
            weights = next(remaining)
            _write(file, weights)
        _load(host, weights)


def _untrained(host: HostTraining) -> HostTraining:
    """Makes the host whose training precedes the episode that ``host`` is about to begin."""
    task = host.task
    if task.origin is None:
        raise ValueError(f"hosts of {task.name} do not start from trained ones")
    before = task.earlier or task
    alone = replace(before.from_new_weights(), build_host=task.origin, earlier=None, slots=None)
    plain = {"name": before.name, "data": host.config.task.data, "precision": host.arithmetic.precision}
    run = {**host.config.run.model_dump(), "controller": "none"}  # whose settings of the env are left out here
    config = TrainingConfig.parse({"task": plain, "run": run})
    episode = host.episode if is_held_out(host.run_seed) else 0
    return _host_for(
        alone,
        resolve(config, alone),
        FIRST_INDEX + host.index,
        host.run_seed,
        episode * (MAX_RESTARTS + 1),  # restarts count as episodes, too
    )


def _host_for(
    task: Task,
    config: HostTrainingConfig,
    index: int,
    run_seed: int,
    episode: int,
) -> HostTraining:
    """Makes a host with new weights for an episode of ``config``."""
    totals = make_metrics(1, task.device)[0]
    host = HostTraining(index, task, config, totals)
    host.reset(run_seed, episode)
    return host


def _train_to_limit(hosts: Sequence[HostTraining], executor: Executor) -> list[Weights]:
    """Trains each host for its schedule, then on for half as long as often as that gains ``MIN_GAIN``.

    Returns the weights with the best validation accuracy. Each restart begins at the full learning rate. Raises
    ConfigError for a host that diverges.
    """
    _train(hosts, executor)
    best = []
    weights = []
    for host in hosts:
        best.append(_accuracy(host))
        weights.append(_weights_of(host.host))

    # Hosts that gain too little are at their limit, and the others go on.
    going_on = list(range(len(hosts)))
    for restart in range(1, MAX_RESTARTS + 1):
        again = [_restarted(hosts[i], weights[i], restart) for i in going_on]
        _train(again, executor)
        gaining = []
        for i, host in zip(going_on, again, strict=True):
            accuracy = _accuracy(host)
            gain = accuracy - best[i]
            if gain > 0:
                best[i] = accuracy
                weights[i] = _weights_of(host.host)
            if gain >= MIN_GAIN:
                gaining.append(i)
        going_on = gaining
        if not going_on:
            break
    return weights


def _restarted(host: HostTraining, weights: Weights, restart: int) -> HostTraining:
    """Returns a host like ``host`` that goes on from ``weights``, with half of its epochs and other batches."""
    length = math.ceil(host.config.env.episode_length / 2)
    config = host.config.with_values(env={"episode_length": length})
    restarted = _host_for(host.task, config, host.index, host.run_seed, host.episode + restart)
    _load(restarted, weights)
    return restarted


def _train(hosts: Sequence[HostTraining], executor: Executor) -> None:
    """Trains hosts for an episode, without growth and without a governor."""
    with closing(HostTrainer(hosts[0].task, hosts, executor)) as trainer:
        for _ in range(hosts[0].horizon):
            trainer.epoch(hosts)


def _accuracy(host: HostTraining) -> float:
    """Returns the validation accuracy, pp. Raises ConfigError if the host has diverged."""
    accuracy, loss = _validated(host)
    if not math.isfinite(loss):
        raise ConfigError(
            f"task.start is trained, but a host diverged when it was trained alone with the settings of "
            f"{host.task.name}: give the task a lower learning_rate"
        )
    return accuracy


def _validated(host: HostTraining) -> tuple[float, float]:
    """Returns the accuracy, pp, and the loss on the validation split."""
    evaluation = evaluate(host, host.task.validation, [all_off(host)])
    return float(evaluation.accuracy[0]), float(evaluation.loss[0])


def _named(host: Host) -> dict[str, Tensor]:
    return dict(chain(host.named_parameters(), host.named_buffers()))


def _weights_of(host: Host) -> Weights:
    return {name: tensor.detach().cpu().clone() for name, tensor in _named(host).items()}


@torch.no_grad()
def _load(training: HostTraining, weights: Weights) -> None:
    """Gives a new host what was learned; one with built-in seeds in the network that they are built into."""
    host = training.host
    task = training.task
    if task.transfer is not None and task.origin is not None:
        seed = derive_seed(training.run_seed, training.index, training.episode, RngStream.HOST)
        with seeded(seed):
            trained = task.origin().to(training.device)
            trained.probe(training.sample)
            _copy(weights, trained)
            task.transfer(trained, host)
    else:
        # The network that was trained alone lies inside those that grow out of it.
        while isinstance(host, GrownHost) and _named(host).keys() != weights.keys():
            host = host.host
        _copy(weights, host)
    training.finite_buffers = finite_buffers(training.host)


def _copy(weights: Weights, host: Host) -> None:
    for name, tensor in _named(host).items():
        tensor.copy_(weights[name])


def _file_of(start: HostTraining) -> Path:
    """Returns the file for the weights that training ``start`` leads to, named after what they depend on.

    These are its settings, its data, its new weights, and what it does: code of a user's may change with its name kept,
    so the scores of the new host and its gradients count, too, which tell another loss, score or activation.
    """
    digest = hashlib.sha256()
    settings = start.config.task.model_dump(exclude={"data", "download"})
    facts = (
        settings,
        start.horizon,
        start.index,
        start.run_seed,
        start.episode,
        MIN_GAIN,
        MAX_RESTARTS,
    )
    versions = metadata.version("esper-grow"), torch.__version__, start.device.type
    digest.update(json.dumps([versions, facts, repr(start.task.augmentation)]).encode())
    for tensor in (*_named(start.host).values(), *_data_of(start.task), *_behaviour(start)):
        values = tensor.detach().cpu().contiguous().flatten()
        digest.update(values.view(torch.uint8).numpy().tobytes())
    folder = DataOptions.of(start.config.task).folder / "starts"
    name = start.task.name.replace("/", "_")
    return folder / f"{name}-{digest.hexdigest()[:32]}.safetensors"


def _data_of(task: Task) -> list[Tensor]:
    """Returns the data of ``task``; of streamed data, its first samples."""
    tensors: list[Tensor] = []
    for split in (task.train, task.validation):
        if not isinstance(split, Split):
            continue
        tensors.extend(tensors_of(split.x))
        tensors.append(split.y)
        if split.table is not None:
            tensors.append(split.table)
    tensors.extend(tensors_of(as_inputs(task.calibration_inputs())))
    return tensors


def _behaviour(start: HostTraining) -> list[Tensor]:
    """Returns the scores of the new host on a few validation samples, and the gradients of its loss there."""
    task = start.task
    prepare_epoch(start)
    add_gradients(start, task.sample, task.validation.y[:SAMPLE], None)
    gradients = [p.grad.clone() for p in start.host_group.parameters if p.grad is not None]
    start.reset(start.run_seed, start.episode)  # the pass has changed buffers and generators
    return [*gradients, torch.tensor(_validated(start))]


def _read(file: Path) -> Weights | None:
    """Returns the weights in ``file``; None for a file that cannot be read."""
    try:
        return safetensors.torch.load_file(file)
    except (OSError, safetensors.SafetensorError):
        return None


def _write(file: Path, weights: Weights) -> None:
    """Keeps the weights; if that is impossible, warns that they will be trained again."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, safetensors.torch.save(weights))
    except OSError as error:
        warnings.warn(f"weights to start from are not kept, and are trained again when needed: {error}", stacklevel=2)
