"""The baselines of training: their hosts learn, on every sample of an epoch once, and their variants are raced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from esper.bench import baselines
from esper.bench.baselines import (
    Epoch,
    TorchHosts,
    Variant,
    Workload,
    choose_threads,
    in_processes,
    plain_cnn,
    shares,
    tuned,
)
from esper.config import Optimizer
from esper.data import digits
from esper.hosts.cnn import CNNHost
from tests.selection import slow_except

BFLOAT16 = torch.bfloat16


def work(hosts: int = 2, samples: int = 64, optimizer: Optimizer = "sgd") -> Workload:
    """Images whose brightness is their class."""
    torch.manual_seed(0)
    y = torch.arange(samples) % 10
    x = torch.randn(samples, 3, 8, 8) + y.view(-1, 1, 1, 1)
    return Workload(partial(plain_cnn, 3, 10, 4, 2), hosts, x, y, 16, optimizer)


@pytest.mark.parametrize(
    ("host", "other"),
    [
        (CNNHost(3, 10, base=4, blocks=3), plain_cnn(3, 10, base=4, blocks=3)),
        (digits.build_host(), plain_cnn(1, 10, base=3, blocks=2, pool_last=False)),
    ],
)
def test_both_sides_train_the_same_network(host: CNNHost, other: nn.Module) -> None:
    # Buffers of the two have the same order and other names.
    own = list(host.state_dict().values())
    other.load_state_dict(dict(zip(other.state_dict(), own, strict=True)))
    x = torch.randn(4, own[0].shape[1], 16, 16)
    torch.testing.assert_close(other.train()(x), host.train()(x))
    torch.testing.assert_close(other.eval()(x), host.eval()(x))


@pytest.mark.parametrize(
    ("variant", "optimizer"),
    [
        (Variant(channels_last=False), "sgd"),
        (Variant(BFLOAT16), "adamw"),
    ],
)
def test_hosts_learn_in_each_variant(variant: Variant, optimizer: Optimizer) -> None:
    hosts = TorchHosts(work(optimizer=optimizer), variant)
    first = hosts.epoch()
    for _ in range(8):
        last = hosts.epoch()
    for now, before in zip(last, first, strict=True):
        assert now < 0.8 * before


class Recorder(nn.Linear):
    """Counts the samples that it is trained on; the value of a sample is its number."""

    def __init__(self) -> None:
        super().__init__(1, 10)
        self.seen: Counter[int] = Counter()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """A prediction for each sample."""
        self.seen.update(input.flatten().int().tolist())
        return super().forward(input)


@pytest.mark.parametrize("variant", [Variant(), Variant(BFLOAT16)])
def test_an_epoch_trains_each_host_on_every_sample_once(variant: Variant) -> None:
    x = torch.arange(48.0).view(-1, 1)
    data = Workload(Recorder, 2, x, torch.zeros(48, dtype=torch.int64), batch=8)
    hosts = TorchHosts(data, variant)
    before = [host.bias.clone() for host in hosts.hosts]
    hosts.epoch()
    for host, bias in zip(hosts.hosts, before, strict=True):
        assert host.seen == Counter(range(48))
        assert not torch.equal(host.bias, bias)
    assert replace(data, batch=10).steps == 4  # full batches only


def test_the_fastest_variant_is_taken_and_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[Variant] = []

    def seconds(hosts: TorchHosts) -> float:
        tried.append(hosts.variant)
        return 3.0 - (hosts.variant.precision == BFLOAT16) - hosts.variant.compiled

    monkeypatch.setattr(baselines, "step_seconds", seconds)
    monkeypatch.setattr(baselines, "usable_cores", lambda: 1)
    monkeypatch.setattr(torch, "compile", lambda host: host)
    with tuned(work()) as (name, epoch):
        assert len(epoch()) == 2
    assert name == ("tuned PyTorch: bfloat16 channels_last, compiled, best threads: 1")
    eager = [Variant(), Variant(channels_last=False)]
    eager += [replace(variant, precision=BFLOAT16) for variant in eager]
    raced = [*eager, Variant(BFLOAT16, compiled=True)]
    assert list(dict.fromkeys(tried)) == raced
    tried.clear()
    float32 = replace(work(), precisions=(torch.float32,))
    with tuned(float32, compiles=False) as (name, _):
        assert "float32 channels_last, eager" in name
    assert set(tried) == {Variant(), Variant(channels_last=False)}


def test_threads_are_chosen_by_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(hosts: TorchHosts) -> float:
        return abs(hosts.threads - 3)

    monkeypatch.setattr(baselines, "step_seconds", seconds)
    monkeypatch.setattr(baselines, "usable_cores", lambda: 5)
    hosts = TorchHosts(work(), Variant())
    assert choose_threads(hosts) == "best threads: 3"
    before = torch.get_num_threads()
    hosts.epoch()
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("hosts", "processes", "expected"),
    [(4, 2, [2, 2]), (3, 2, [2, 1]), (1, 2, [1]), (2, 4, [1, 1])],
)
def test_hosts_are_dealt_out_in_turns(
    hosts: int, processes: int, expected: list[int]
) -> None:
    assert shares(hosts, processes) == expected


@contextmanager
def counting(number: int) -> Iterator[Epoch]:
    """An epoch that says how many epochs its process had before."""
    epochs: list[Any] = []

    def epoch() -> tuple[int, int, int]:
        epochs.append(None)
        return number, len(epochs), torch.get_num_threads()

    yield epoch


@pytest.mark.slow  # two processes start
def test_each_process_trains_its_own_hosts_with_one_thread() -> None:
    with in_processes([partial(counting, 7), partial(counting, 8)]) as epoch:
        assert epoch() == [(7, 1, 1), (8, 1, 1)]
        assert epoch() == [(7, 2, 1), (8, 2, 1)]


@pytest.mark.parametrize("cores", slow_except([], [2]))
def test_several_hosts_are_spread_over_the_cores(
    cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(baselines, "usable_cores", lambda: cores)
    with tuned(work(hosts=3), compiles=False) as (name, epoch):
        assert name.endswith(f"eager, {cores} processes of 1 thread")
        assert list(map(len, epoch())) == [2, 1]
