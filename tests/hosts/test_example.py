"""A pass on an example takes arguments of any form and leaves no trace in the network."""

from __future__ import annotations

import random
import threading
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from esper.config import ConfigError
from esper.hosts.example import outputs_of, require_outputs


class Echo(nn.Module):
    """Returns its arguments."""

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        return arguments, keywords


X = torch.arange(6.0).reshape(2, 3)
PACKED = pack_sequence([torch.ones(3, 2), torch.ones(2, 2)])


@pytest.mark.parametrize(
    ("example", "shapes"),
    [
        (X, [(2, 3)]),
        ((X, None, X[:1]), [(2, 3), (1, 3)]),
        ({"x": X, "flag": True, "more": [X, X[0]]}, [(2, 3), (2, 3), (3,)]),
        ([X, X[0]], [(2, 3), (3,)]),
        (({"x": X},), [(2, 3)]),
        (PACKED, [(5, 2), (3,)]),
        (X.requires_grad_() * 2, [(2, 3)]),
    ],
)
def test_an_example_holds_arguments_of_any_kind(
    example: Any, shapes: list[tuple[int, ...]]
) -> None:
    assert [tuple(tensor.shape) for tensor in outputs_of(Echo(), example)] == shapes


def test_a_named_tuple_is_one_argument() -> None:
    kept: list[Any] = []
    network = Echo()
    network.register_forward_hook(lambda _module, inputs, _output: kept.extend(inputs))
    outputs_of(network, PACKED)
    assert type(kept[0]) is type(PACKED)


class Counts(nn.Module):
    """Counts its passes, keeps its last output, draws random numbers and overwrites its input."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))
        self.register_buffer("wide", torch.zeros(1).expand(4))
        self.calls = 0
        self.last: Tensor | None = None
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1  # type: ignore[operator]
        self.calls += 1
        self.extra = x
        h = self.norm(x.add_(1)) * self.passes + torch.rand(())
        self.last = out = h if self.last is None else h + self.last
        return out


@pytest.mark.parametrize("training", [False, True])
def test_a_pass_leaves_no_trace(training: bool) -> None:
    network, x = Counts(), torch.randn(4, 3)
    network.norm.eval()
    before, state = x.clone(), torch.get_rng_state()
    first, second = (outputs_of(network, x, training=training) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert torch.equal(x, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert (network.calls, network.last, float(network.passes)) == (0, None, 0.0)  # type: ignore[arg-type]
    assert not hasattr(network, "extra")
    assert int(network.norm.num_batches_tracked) == 0  # type: ignore[arg-type]
    assert (network.training, network.norm.training) == (True, False)


PRECISIONS = torch.backends.mkldnn  # type: ignore[attr-defined]


def test_a_pass_whose_outputs_are_compared_computes_products_in_full_precision() -> (
    None
):
    """With TF32 or bfloat16, networks that compute the same differ by more than float32 rounds."""
    network, seen = nn.Linear(3, 3), []
    network.register_forward_hook(
        lambda *_: seen.append(
            (PRECISIONS.matmul.fp32_precision, PRECISIONS.conv.fp32_precision)
        )
    )
    usual = PRECISIONS.matmul.fp32_precision
    PRECISIONS.matmul.fp32_precision = "bf16"
    try:
        outputs_of(network, X)
        afterwards = PRECISIONS.matmul.fp32_precision
    finally:
        PRECISIONS.matmul.fp32_precision = usual
    assert seen == [("ieee", "ieee")]
    assert afterwards == "bf16"


def test_what_cannot_run_or_has_no_tensor_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="put a single argument that is one of these in a tuple"
    ):
        outputs_of(nn.Linear(3, 3), {"x": X})
    with pytest.raises(ConfigError, match="in which there is no tensor"):
        outputs_of(Echo(), 3)


def test_statistics_of_a_batch_norm_are_restored_after_a_training_pass() -> None:
    norm = nn.BatchNorm1d(3)
    outputs_of(norm, torch.randn(8, 3) + 5, training=True)
    assert torch.equal(norm.running_mean, torch.zeros(3))
    assert torch.equal(norm.running_var, torch.ones(3))


class Remembers(nn.Module):
    """Keeps a state of every kind, but in no buffer, and draws from all generators."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(3)
        self.counts = {"passes": 0}
        self.sizes: deque[int] = deque(maxlen=2)
        self.nested = [(torch.zeros(()), [0])]
        self.array = np.zeros(2)
        self.meter = SimpleNamespace(total=0.0, values=[])

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.5)
        self.counts["passes"] += 1
        self.sizes.append(len(x))
        self.nested[0][0].add_(1)
        self.nested[0][1].append(1)
        self.array += 1
        self.meter.total += float(x.detach().sum())
        self.meter.values.append(self.meter.total)
        drawn = random.random() + float(np.random.rand())  # noqa: NPY002
        return x - self.mean + drawn + self.meter.total

    @property
    def state(self) -> str:
        return str(
            [
                vars(self)[name]
                for name in ("mean", "counts", "sizes", "nested", "array", "meter")
            ]
        )


def test_a_pass_leaves_no_trace_in_what_attributes_hold() -> None:
    network = Remembers()
    network(torch.ones(2, 3))
    before, drawn = network.state, (random.getstate(), np.random.get_state()[2])  # noqa: NPY002
    holders = [
        id(vars(network)[name]) for name in ("counts", "sizes", "nested", "meter")
    ]
    first, second = (outputs_of(network, X) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert network.state == before
    assert (random.getstate(), np.random.get_state()[2]) == drawn  # noqa: NPY002
    assert [
        id(vars(network)[name]) for name in ("counts", "sizes", "nested", "meter")
    ] == holders


def test_arguments_without_a_copy_are_handed_over_as_they_are() -> None:
    lock = threading.Lock()
    kept: list[Any] = []
    network = Echo()
    network.register_forward_hook(lambda _module, inputs, _output: kept.extend(inputs))
    with open(__file__) as file:
        outputs_of(network, (X, {"lock": lock, "x": X}, [file, X]))
    assert kept[1]["lock"] is lock
    assert kept[2][0] is file
    assert kept[1]["x"] is not X
    assert kept[2][1] is not X


@pytest.mark.parametrize(
    ("classes", "shape"),
    [
        (5, (2, 5)),
        (5, (2, 8)),  # padded
        (2, (2, 1)),
        (5, (2, 5, 3)),
        (5, (2, 3, 5)),
        (5, ()),
        (5, (2,)),
    ],
)
def test_outputs_with_room_for_the_scores_of_all_classes_are_taken(
    classes: int, shape: tuple[int, ...]
) -> None:
    require_outputs(classes, [torch.zeros(()), torch.zeros(shape)])


@pytest.mark.parametrize(
    ("classes", "shape", "words"),
    [
        (6, (2, 5), "classes is 6, more than the outputs of the model for a sample, 5"),
        (3, (2, 1), "classes is 3, more than the outputs of the model for a sample, 1"),
        (6, (2, 5, 3), r"classes is 6, and the model returns fewer .*\(2, 5, 3\)"),
    ],
)
def test_fewer_outputs_than_classes_are_refused(
    classes: int, shape: tuple[int, ...], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        require_outputs(classes, [torch.zeros(()), torch.zeros(shape)])
