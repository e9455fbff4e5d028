"""Hosts of users: incubation, evaluation and random numbers work for any module, and for texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.config import ConfigError
from esper.data.host_checks import check_hosts
from esper.data.objective import PAD
from esper.data.split import Split
from esper.data.task import Task, resolve
from esper.hosts.graft import graft
from esper.hosts.host import Host
from esper.ops.cross_entropy import cross_entropy
from esper.training.host_training import HostTraining
from esper.training.metrics import make_metrics
from esper.training.validate import evaluate
from tests.core_helpers import digits, same_bits, tensors_of, tiny_config, train


class Network(nn.Module):
    """A user's: batch normalisation, layers that write over features, dropout of both kinds, a moving average."""

    def __init__(self, modules: float = 0.0, functional: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4))
        self.second = nn.Sequential(
            nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)
        )
        self.dropout = nn.Dropout2d(modules)
        self.functional = functional
        self.head = nn.Linear(4, 10)
        self.register_buffer("average", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.dropout(F.relu_(self.first(x)))
        h = F.dropout(self.second(h), self.functional, self.training).mean((2, 3))
        if self.training:
            self.average = 0.9 * self.average + 0.1 * h.detach().mean()
        return self.head(h)  # type: ignore[no-any-return]


def grafted(**dropout: float) -> Callable[[], Host]:
    return lambda: graft(Network(**dropout), {"r0c0": "first", "r0c1": "second"})


def of(build_host: Callable[[], Host]) -> Task:
    base = digits()
    return Task("mine", 10, build_host, base.train, base.validation, base.test)


def training_of(task: Task, /, index: int = 0, **sections: Any) -> HostTraining:
    config = resolve(tiny_config(**sections), task)
    made = HostTraining(index, task, config, make_metrics(1, torch.device("cpu"))[0])
    made.reset(0, 0)
    return made


HOSTS = {
    "plain": grafted(),
    "dropout modules": grafted(modules=0.5),
    "functional dropout": grafted(functional=0.5),
}


@pytest.mark.parametrize("kind", HOSTS)
def test_random_numbers_belong_to_the_host(kind: str) -> None:
    task = of(HOSTS[kind])
    first, again, other = (
        training_of(task),
        training_of(task),
        training_of(task, index=1),
    )
    assert first.host_draws_globally == (kind == "functional dropout")
    before = torch.get_rng_state()
    train(first, 1)
    train(other, 1)  # in between, and with other noise in the process's generator
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(99)
    train(again, 1)
    same_bits(tensors_of(first), tensors_of(again))


# Texts

VOCABULARY = 7


class Bigram(nn.Module):
    """Tokens [B, T] to logits [B, T, V] of the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.mix(self.embed(x))))  # type: ignore[no-any-return]


def texts(count: int = 96, padding: bool = True) -> Split:
    generator = torch.Generator().manual_seed(count)
    tokens = torch.randint(VOCABULARY, (count, 6), generator=generator)
    y = (tokens + 1) % VOCABULARY
    if padding:
        y[::2, 3:] = PAD
    return Split(tokens, y)


def language(train: Split | None = None) -> Task:
    validation = texts(40)
    return Task(
        "text",
        VOCABULARY,
        lambda: graft(Bigram(), {"r0c0": "mix"}, topology="transformer"),
        train or texts(),
        validation,
        texts(30),
    )


@pytest.mark.trap(16)
def test_padding_counts_in_no_loss_and_no_accuracy() -> None:
    task = language()
    training = training_of(task)
    logits = training.host(task.validation.x)
    result = evaluate(training, task.validation, [(0.0,)])
    counts = task.validation.y != PAD
    right = (logits.argmax(-1) == task.validation.y) & counts
    assert result.correct.dtype == torch.int16
    assert result.correct[0].tolist() == right.sum(1).tolist()
    assert result.accuracy[0] == pytest.approx(100 * float(right.sum() / counts.sum()))
    losses = F.cross_entropy(
        logits.transpose(1, 2), task.validation.y.clamp(min=0), reduction="none"
    )
    assert float(result.loss[0]) == pytest.approx(
        float(losses[counts].detach().mean()), rel=1e-6
    )
    stats = cross_entropy(logits, task.validation.y, ignore_index=PAD).stats
    wanted = [
        float(losses[counts].detach().sum()),
        float(right.sum()),
        float(counts.sum()),
        1,
        0,
    ]
    assert stats.tolist() == pytest.approx(wanted)


@pytest.mark.trap(16)
def test_values_behind_padding_change_no_weight() -> None:
    other = texts()
    tokens = other.x.clone()
    tokens[::2, 3:] = 0  # this host sees one token at a time
    first, second = (
        training_of(language(other)),
        training_of(language(Split(tokens, other.y))),
    )
    train(first, 1)
    train(second, 1)
    same_bits(tensors_of(first), tensors_of(second))


# Wrong input


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {
                "train": Split(
                    torch.zeros(3, 1, 8, 8), torch.zeros(2, dtype=torch.int64)
                )
            },
            "3 inputs and 2 targets",
        ),
        (
            {"validation": Split(torch.zeros(2, 3), torch.full((2, 3), PAD))},
            r"validation split: sample 0 contains only padding \(-100\)",
        ),
    ],
)
def test_data_that_cannot_be_trained_on_is_refused(
    change: dict[str, Split], words: str
) -> None:
    base = digits()
    splits = {
        "train": base.train,
        "validation": base.validation,
        "test": base.test,
        **change,
    }
    with pytest.raises(ConfigError, match=words):
        Task("mine", 10, grafted(), **splits)


def test_a_host_that_does_not_fit_its_task_is_refused() -> None:
    base = digits()
    task = Task("mine", 12, grafted(), base.train, base.validation, base.test)
    with pytest.raises(
        ConfigError,
        match=r"logits of shape \(3, 10\) for 3 samples; expected \(3, 12\)",
    ):
        check_hosts(task)
    with pytest.raises(
        ConfigError, match=r"makes a Network, not a host; see esper\.graft"
    ):
        check_hosts(replace(task, build_host=Network))  # type: ignore[arg-type]
