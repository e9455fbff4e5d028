"""A host in channels_last trains and is validated by Esper's own operators; tests/cuda has the same on a GPU."""

from __future__ import annotations

import pytest
from torch import Tensor
from torch.nn import functional as F

from esper.ops.norm_relu_pool import NormReluPool
from esper.training.step import train_epoch
from esper.training.validate import evaluate
from tests.training.growing import configurations_of
from tests.training.kernels_used import (
    FALLBACKS,
    assert_nothing_falls_back,
    calls_of,
    channels_last_training,
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
        "cpu", precision=precision, optimizer=optimizer, learning_rate=0.01
    )

    def work() -> None:
        train_epoch(training)
        evaluate(
            training,
            training.task.validation,
            configurations_of(training),
            training.totals,
        )

    assert_nothing_falls_back(training, calls_of(work), "cpu")


def test_a_fallback_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same host with the three PyTorch functions in place of the fused layer."""

    def by_torch(norm: NormReluPool, input: Tensor, pool: bool = False) -> Tensor:
        output = F.relu(
            F.batch_norm(
                input,
                norm.running_mean,
                norm.running_var,
                norm.weight,
                norm.bias,
                norm.training,
            )
        )
        return F.max_pool2d(output, 2) if pool else output

    monkeypatch.setattr(NormReluPool, "forward", by_torch)
    training = channels_last_training("cpu")
    calls = calls_of(lambda: train_epoch(training))
    assert calls.aten & FALLBACKS
    with pytest.raises(AssertionError):
        assert_nothing_falls_back(training, calls, "cpu")
