"""All work on a batch of a host is done by one worker, in one step, in order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from esper.data import objective
from esper.training import step as host_step
from esper.training.execution.gpu import Gpu
from esper.training.execution.workers import WorkerExecutor
from esper.training.host_training import HostTraining
from esper.training.metrics import EpochMetrics
from tests.core_helpers import make_training, tiny_config


@pytest.mark.finding("C2")
def test_loss_statistics_totals_and_step_of_a_batch_are_made_by_the_worker_of_its_env(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    env_of_thread: dict[int, int] = {}
    calls: dict[int, list[str]] = {}

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*inputs: Any, **options: Any) -> Any:
            calls[env_of_thread[threading.get_ident()]].append(name)
            return function(*inputs, **options)

        return call

    for module, name in (
        (objective, "cross_entropy"),
        (host_step, "grad_stats"),
        (host_step, "step_all"),
    ):
        monkeypatch.setattr(module, name, noted(name, getattr(module, name)))
    monkeypatch.setattr(
        EpochMetrics, "add_training", noted("add_training", EpochMetrics.add_training)
    )

    def train(training: HostTraining) -> None:
        env_of_thread[threading.get_ident()] = training.index
        calls[training.index] = []
        host_step.train_epoch(training)
        del env_of_thread[threading.get_ident()]

    config = tiny_config(task={"samples_per_epoch": 96, "batch_size": 32})
    with WorkerExecutor(3) as executor:
        executor.run(train, [make_training(config, index=index) for index in range(5)])
    assert calls == {
        index: ["cross_entropy", "add_training", "grad_stats", "step_all"] * 3
        for index in range(5)
    }


@pytest.mark.trap(38)
def test_the_backward_passes_of_a_gpus_host_are_queued_by_the_thread_that_queues_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else one thread of torch's does those of all streams, and streams wait for each other in it."""
    for place in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, place, lambda _place: nullcontext())
    gpu = object.__new__(Gpu)  # no device is needed to say where work goes
    gpu.device = torch.device("cuda", 0)
    assert torch.autograd.is_multithreading_enabled()
    with gpu.on(None):  # type: ignore[arg-type]
        assert not torch.autograd.is_multithreading_enabled()
    assert torch.autograd.is_multithreading_enabled()
