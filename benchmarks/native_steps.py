"""Time a training step in compiled code beside the same step by PyTorch, operator by operator, for hosts of many sizes.

    python benchmarks/native_steps.py

One thread, float32; the best of three epochs each. The hosts have no seeds, then one in each of two slots.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from esper.config import TrainingConfig
from esper.core.blueprints import BLUEPRINTS
from esper.core.ramps import STYLES
from esper.core.site import Role
from esper.data.task import Task, resolve
from esper.data.tasks import load_task
from esper.hosts.cnn import CNNHost
from esper.training.host_training import HostTraining
from esper.training.metrics import make_metrics
from esper.training.native import NativePasses
from esper.training.step import train_epoch

EPOCHS = 3
BATCHES = 4


def wider(task: Task, base: int) -> Task:
    """The task with hosts of this many channels in the first block."""
    host = lambda: CNNHost(1, 10, base=base, blocks=2, pool_last=False)  # noqa: E731
    return replace(task, build_host=host)


def make(task: Task, batch: int, seeds: bool, native: bool) -> HostTraining:
    settings = {
        "batch_size": batch,
        "samples_per_epoch": BATCHES * batch,
        "precision": "float32",
    }
    config = resolve(TrainingConfig.parse({"task": settings}), task)
    training = HostTraining(0, task, config, make_metrics(1, torch.device("cpu"))[0])
    training.reset(0, 0)
    roles = [Role.INCUBATING, Role.BLENDED] if seeds else []
    sites = [site for site in training.sites if not site.place.has_source]
    for site, role in zip(sites, roles, strict=False):
        name = "conv_light" if training.host.topology == "cnn" else "mlp_small"
        blueprint = BLUEPRINTS.at(training.host.topology, site.place, name)
        training.plant(site, blueprint, STYLES["LINEAR_ADD"])
        training.assign(site, role, 0.5, 1.0, True)
    if native:
        training.native = NativePasses(training)
    return training


def milliseconds(training: HostTraining) -> float:
    train_epoch(training)
    best = float("inf")
    for _ in range(EPOCHS):
        begun = time.perf_counter()
        train_epoch(training)
        best = min(best, time.perf_counter() - begun)
    return 1000 * best / BATCHES


def row(name: str, load: Callable[[], Task], batch: int, seeds: bool) -> None:
    task = load()
    eager = milliseconds(make(task, batch, seeds, native=False))
    training = make(task, batch, seeds, native=True)
    native = milliseconds(training)
    assert training.native is not None
    assert not training.native.reasons, training.native.reasons
    size = training.native._flops / 1e6
    with_seeds = "2 seeds" if seeds else "-"
    print(
        f"| {name} | {batch} | {with_seeds} | {size:.1f} | {eager:.2f} | {native:.2f} | {eager / native:.1f} |",
        flush=True,
    )


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    torch.set_num_threads(1)
    digits = load_task("digits")
    print("| hosts | batch | seeds | MFLOP | eager, ms | native, ms | ratio |")
    print("|---|---|---|---|---|---|---|")
    for base in (3, 6, 12, 24, 48):
        row(
            f"`digits`, {base}-{2 * base} channels",
            lambda base=base: wider(digits, base),
            128,
            seeds=False,
        )
    row("`digits`, 3-6 channels", lambda: digits, 64, seeds=True)
    row("`digits_table`, 64-8-10", lambda: load_task("digits_table"), 32, seeds=False)
    row("`fashion_mnist`", lambda: load_task("fashion_mnist"), 128, seeds=False)
    for batch, seeds in ((8, False), (32, False), (8, True)):
        row("`chars`", lambda: load_task("chars"), batch, seeds)


if __name__ == "__main__":
    main()
