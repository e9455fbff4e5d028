"""Tasks that the hand-written rule was not made for: an MLP on a table, a GRU on text, and a CNN.

Figures are in results/heuristic.md.

esper compare --task benchmarks/unseen_networks.py:mlp --arm heuristic --arm none --pairs 16
"""

import pydoc_data.topics
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from sklearn.datasets import load_breast_cancer, load_digits
from torch import Tensor, nn

import esper
from esper.hosts.host import Host


def split(
    x: Tensor, y: Tensor, first: int, second: int, seed: int
) -> list[esper.Split]:
    """Returns a shuffled training, validation and test split; the first two have ``first`` and ``second`` samples."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    return [
        esper.Split(x[rows], y[rows])
        for rows in order.tensor_split([first, first + second])
    ]


def mlp() -> esper.Task:
    """Two hidden layers of 16 on breast_cancer: 802 parameters."""
    data = load_breast_cancer()
    splits = split(
        torch.tensor(data.data, dtype=torch.float32),
        torch.tensor(data.target),
        340,
        115,
        seed=0,
    )
    mean, std = splits[0].x.mean(0), splits[0].x.std(0)
    splits = [esper.Split((each.x - mean) / std, each.y) for each in splits]

    def host() -> Host:
        hidden = [
            nn.Sequential(nn.Linear(inputs, 16), nn.ReLU()) for inputs in (30, 16)
        ]
        return esper.graft(
            nn.Sequential(*hidden, nn.Linear(16, 2)),
            {"r0c0": "0", "r0c1": "1"},
            topology="mlp",
        )

    return task("mlp", 2, host, splits, 30, rate=0.01, batch=34)


class TextGRU(nn.Module):
    """Predicts the next character with two GRUs."""

    def __init__(self, characters: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(characters, width)
        self.first, self.second = (
            nn.GRU(width, width, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(width, characters)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(self.embed(x))[0])[0])


def gru() -> esper.Task:
    """Next characters of the help texts included in Python, in windows of 32, by GRUs of 32: 19,172 parameters."""
    text = "".join(
        pydoc_data.topics.topics[key] for key in sorted(pydoc_data.topics.topics)
    )[: 32 * 3200 + 1]
    characters = sorted(set(text))
    tokens = torch.tensor([characters.index(character) for character in text])
    x, y = tokens[:-1].view(-1, 32), tokens[1:].view(-1, 32)

    def host(width: int) -> Host:
        return esper.graft(
            TextGRU(len(characters), width),
            {"r0c0": "first", "r0c1": "second"},
            topology="transformer",
        )

    hosts = esper.HostFamily(host, width=32)
    return task(
        "gru",
        len(characters),
        hosts,
        split(x, y, 2000, 400, seed=0),
        20,
        rate=0.01,
        batch=50,
    )


def cnn(sites: Sequence[str] = ("0", "1")) -> esper.Task:
    """Two convolutions of 4 and 8 channels on 8x8 digits: 450 parameters."""
    data = load_digits()
    x, y = (
        torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 8 - 1,
        torch.tensor(data.target),
    )

    def host(width: int) -> Host:
        model = nn.Sequential(
            nn.Sequential(
                nn.Conv2d(1, width, 3, padding=1),
                nn.BatchNorm2d(width),
                nn.ReLU(),
                nn.MaxPool2d(2),
            ),
            nn.Sequential(
                nn.Conv2d(width, 2 * width, 3, padding=1),
                nn.BatchNorm2d(2 * width),
                nn.ReLU(),
            ),
            nn.Sequential(
                nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10)
            ),
        )
        return esper.graft(model, sites)

    return task(
        "cnn",
        10,
        esper.HostFamily(host, width=4),
        split(x, y, 1000, 400, seed=1),
        30,
        rate=0.02,
        batch=50,
    )


def cnn_wide() -> esper.Task:
    """The same with slots for more channels, which join their host at once."""
    return replace(
        cnn(["0", "1", "0.0 -> 1.0", "1.0 -> 2.2"]), name="cnn_wide", at_once=True
    )


def task(
    name: str,
    classes: int,
    host: Callable[[], Host],
    splits: list[esper.Split],
    epochs: int,
    rate: float,
    batch: int,
) -> esper.Task:
    """Returns the task with AdamW at this learning rate, cosine to zero after a warm-up of one epoch."""
    return esper.Task(
        name=name,
        classes=classes,
        build_host=host,
        train=splits[0],
        validation=splits[1],
        test=splits[2],
        learning_rate=rate,
        batch_size=batch,
        optimizer="adamw",
        weight_decay=0.01,
        warmup_epochs=1.0,
        episode_length=epochs,
        n_envs=8,
    )
