"""A host in channels_last trains and is validated on a GPU by Esper's own kernels, queued and captured."""

from __future__ import annotations

import pytest
import torch

from esper.training.execution.gpu import Gpu
from esper.training.execution.streams import StreamExecutor
from esper.training.host_trainer import HostTrainer
from esper.training.host_training import HostTraining
from esper.training.step import train_epoch
from esper.training.validate import evaluate
from tests.training.growing import configurations_of
from tests.training.kernels_used import (
    assert_nothing_falls_back,
    calls_of,
    channels_last_training,
)

pytestmark = pytest.mark.cuda


def validate(training: HostTraining) -> None:
    evaluate(
        training,
        training.task.validation,
        configurations_of(training),
        training.totals,
    )


@pytest.mark.parametrize(
    ("precision", "optimizer"),
    [("float32", "sgd"), ("bfloat16", "sgd"), ("float32", "adamw")],
)
def test_a_channels_last_host_with_seeds_takes_no_fallback(
    precision: str, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESPER_REQUIRE_NATIVE", "1")
    training = channels_last_training(
        "cuda", precision=precision, optimizer=optimizer, learning_rate=0.01
    )

    def work() -> None:
        train_epoch(training)
        validate(training)

    assert_nothing_falls_back(training, calls_of(work), "cuda")


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_channels_last_host_is_captured_without_a_fallback(
    optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps and validation are captured from the same kernels, and Python queues nothing."""
    monkeypatch.setenv("ESPER_REQUIRE_NATIVE", "1")
    training = channels_last_training(
        "cuda", samples_per_epoch=256, optimizer=optimizer, learning_rate=0.01
    )
    with StreamExecutor(Gpu(torch.device("cuda"))) as executor:
        trainer = HostTrainer(training.task, [training], executor)

        def work() -> None:
            for _ in range(2):
                trainer.epoch([training])
                trainer.run(validate, [training])

        calls = calls_of(work)
        assert executor.reasons() == {}
        assert len(executor.graphs[training.index]) == 2  # the step and the validation
        trainer.close()
    assert_nothing_falls_back(training, calls, "cuda")
