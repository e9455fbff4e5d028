"""Hosts that cannot be trained or grown are refused before a run starts, with the reason."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import esper
from esper.data.host_checks import check_hosts
from esper.hosts.graft import GraftedHost
from tests.data.objective_tasks import Y, task
from tests.hosts.plain_models import Plain, double, splits, task_of

# What is refused

SHARED = Plain()


class Checkpointed(Plain):
    def forward(self, x: Tensor) -> Any:
        return self.last(checkpoint(self.first, x, use_reentrant=False))


class SwitchedOff(Plain):
    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            h = self.first(x)
        return self.last(h)


class Pairs(Plain):
    def forward(self, x: Tensor) -> Any:
        logits = super().forward(x)
        return (logits, logits) if self.training else logits


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 8, sparse=True)
        self.first = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        return self.first(self.embed((x[:, 0] > 0).long()))


class Complex(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.zeros(8, dtype=torch.complex64))


class Nothing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Identity()

    def forward(self, x: Tensor) -> Any:
        return self.first(x)[:, :3]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: SHARED,
            "two hosts share model.first.weight: build_host must return a new network each time",
        ),
        (Checkpointed, "runs layers again in the backward pass"),
        (SwitchedOff, "gradients are switched off at slot r0c0"),
        (Pairs, r"in training the host returns tuple, not logits \(3, 3\)"),
        (Sparse, "gradient of model.embed.weight is sparse"),
        (Nothing, "the host has no parameters"),
        (
            Complex,
            "model.phase is torch.complex64; trainable parameters must be one of",
        ),
        (double, "cannot run on inputs torch.float32 of shape"),
    ],
)
def test_a_network_that_cannot_be_grown_is_refused_with_the_reason(
    make: Callable[[], nn.Module], words: str
) -> None:
    with pytest.raises(esper.ConfigError, match=words):
        check_hosts(task_of(make, "first"))


def test_seeds_that_see_the_next_token_are_refused_where_it_is_to_be_predicted() -> (
    None
):
    text = esper.Split.of_text(torch.arange(200) % 3, 4)

    def make(topology: str) -> esper.Task:
        def host() -> GraftedHost:
            return esper.graft(
                nn.Sequential(nn.Embedding(3, 8), nn.Linear(8, 3)),
                {"r0c0": "0"},
                topology,
            )

        return esper.Task(
            "mine", 3, host, text, text.evenly_spaced(9), text.evenly_spaced(9)
        )

    check_hosts(make("transformer"))
    with pytest.raises(
        esper.ConfigError, match="the next tokens, which seeds of an encoder would see"
    ):
        check_hosts(make("encoder"))


def test_features_with_the_samples_second_are_refused() -> None:
    """torch's transformers put them there unless told otherwise."""
    tokens = torch.randn(96, 5, 8)
    layer = nn.TransformerEncoderLayer(8, 2, 16)

    def build_host() -> GraftedHost:
        encoder = nn.TransformerEncoder(
            copy.deepcopy(layer), 1, enable_nested_tensor=False
        )
        return esper.graft(Swapped(encoder), {"r0c0": "encoder"}, "transformer")

    task = esper.Task("mine", 3, build_host, *splits(x=tokens))
    with pytest.raises(
        esper.ConfigError, match=r"encoder returns \[T, B, D\]: samples must come first"
    ):
        check_hosts(task)


class Swapped(nn.Module):
    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.encoder(x.transpose(0, 1)).mean(0))


def accepted(made: esper.Task) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        check_hosts(made)


def scaled(value: float) -> Any:
    return lambda o, y: value * (o - y).abs().mean(1)


def rising(o: Tensor, y: Tensor) -> Tensor:
    return (o - y).abs().mean() - (o - y).abs().mean(1)


REFUSED = {
    "a mean": (
        lambda o, y: F.mse_loss(o, y),
        r"shape \(\) .*tensor of shape \[3\] or \[3, ...\]; .*reduction='none'",
    ),
    "not a tensor": (
        lambda o, y: 1.0,
        "returns float; it must return one value per sample",
    ),
    "integers": (
        lambda o, y: (o > y).long()[:, 0],
        r"returns torch.int64; expected floating-point",
    ),
    "an error": (
        lambda o, y: o @ y,
        r"the loss fails for outputs \(3, 1\) and targets torch.float32 \(3, 1\): Runtime",
    ),
    "other samples": (rising, "changes with the other samples of its batch"),
    "no gradient": (lambda o, y: (o - y).detach(), "the loss has no gradient"),
    "not finite": (
        lambda o, y: (o - y).abs() / 0,
        "the loss of an untrained host is not finite",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_loss_that_is_not_one_value_per_sample_is_refused(case: str) -> None:
    loss, words = REFUSED[case]
    with pytest.raises(esper.ConfigError, match=words):
        accepted(task(loss))


def test_shapes_that_would_be_broadcast_are_refused() -> None:
    """[n, 1] minus [n] is [n, n]: a finite number for each sample, and none of them its loss."""
    with pytest.raises(
        esper.ConfigError, match=r"Are shapes broadcast, such as \(n, 1\) with \(n,\)\?"
    ):
        accepted(task(lambda o, y: (o - y) ** 2, Y[:, 0]))
    with pytest.raises(
        esper.ConfigError,
        match=r"outputs of shape \(3, 2\) for targets \(3, 1\); expected the same",
    ):
        accepted(task("mse", outputs=2))


def test_a_score_is_checked_as_a_loss_but_may_count() -> None:
    accepted(task(score=lambda o, y: (o > 0) == (y > 0)))
    with pytest.raises(esper.ConfigError, match=r"the score returns shape \(\)"):
        accepted(task(score=lambda o, y: -F.mse_loss(o, y)))


def test_a_score_in_another_unit_is_refused_until_points_say_so() -> None:
    with pytest.raises(
        esper.ConfigError, match="set points so that scores span about 100 of them"
    ):
        accepted(task(score=scaled(-1e4)))
    accepted(task(score=scaled(-1e4), points=0.01))
    with pytest.raises(esper.ConfigError, match="points is 0; it must be positive"):
        task(points=0)


def test_targets_of_any_shape_and_dtype_are_taken_with_a_loss_for_them() -> None:
    masks = torch.randint(0, 2, (96, 2, 3))

    def loss(o: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(
            o.view(y.shape), y.float(), reduction="none"
        )

    accepted(task(loss, masks, 6, score=lambda o, y: (o.view(y.shape) > 0) == (y > 0)))
    accepted(task("bce", (Y > 0).byte(), score=None))
