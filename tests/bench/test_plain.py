"""The plain baseline trains the same network, and it learns."""

from __future__ import annotations

import pytest
import torch

from esper.bench import plain
from esper.bench.fixtures import split
from esper.bench.plain import PlainTraining, plain_cnn
from esper.data import digits
from esper.hosts.cnn import CNNHost

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("host", "other"),
    [
        (CNNHost(3, 10, base=4, blocks=3), plain_cnn(3, 10, base=4, blocks=3)),
        (digits.build_host(), plain_cnn(1, 10, base=3, blocks=2, pool_last=False)),
    ],
)
def test_both_sides_train_the_same_network(
    host: CNNHost, other: torch.nn.Module
) -> None:
    # Buffers of the two have the same order and other names.
    own = list(host.state_dict().values())
    other.load_state_dict(dict(zip(other.state_dict(), own, strict=True)))
    x = torch.randn(4, 1 if len(own) < 15 else 3, 16, 16)
    torch.testing.assert_close(other.train()(x), host.train()(x))
    torch.testing.assert_close(other.eval()(x), host.eval()(x))


def test_every_host_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "BATCHES", 1)
    data = split(64, 0, CPU)
    x = data.inputs(0, len(data))
    data.y[:] = x[:, 0].mean(dim=(1, 2)).gt(0).long()
    training = PlainTraining([plain_cnn(3, 10, 4, 3) for _ in range(2)], data, batch=16)
    first = [training.train(number, 4)[0] for number in range(2)]
    for _ in range(5):
        training.epoch()
    assert all(training.train(number, 4)[0] < loss for number, loss in enumerate(first))
    assert 1 <= training.threads <= plain.candidates(64)[-1]
    assert f"best threads: {training.threads}" in training.name


def test_an_epoch_restores_the_number_of_threads() -> None:
    data = split(8, 0, CPU)
    training = PlainTraining([plain_cnn(3, 10, 2, 1)], data, batch=4)
    training.threads = 2
    training.epoch()
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize(
    ("cores", "tried"), [(1, [1]), (3, [1, 2, 3]), (20, [*range(1, 9), 16, 20])]
)
def test_all_numbers_of_threads_are_tried_if_there_are_few_cores(
    cores: int, tried: list[int]
) -> None:
    assert plain.candidates(cores) == tried
