"""Networks that start too small, about right and too large, and data that the advisor was not trained or tuned on."""

from __future__ import annotations

import io
import tokenize
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from esper.exam.sources import load_source
from esper.hosts.zoo import import_torchvision

WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LENGTH = 32
"""Characters that a transformer reads."""
CHARACTERS = 128


def mlp(inputs: int, classes: int, width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, classes),
    )


def deep_mlp(inputs: int, classes: int, width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, 2 * width),
        nn.Tanh(),
        nn.Linear(2 * width, width),
        nn.Tanh(),
        nn.Linear(width, width),
        nn.Tanh(),
        nn.Linear(width, classes),
    )


def cnn(inputs: int, classes: int, width: int) -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 14, 14)),
        nn.Conv2d(1, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * width, classes),
    )


def signal_cnn(inputs: int, classes: int, width: int) -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, inputs)),
        nn.Conv1d(1, width, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool1d(2),
        nn.Conv1d(width, 2 * width, 5, padding=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool1d(4),
        nn.Flatten(),
        nn.Linear(8 * width, classes),
    )


class Block(nn.Module):
    """Two convolutions beside a shortcut, with ``width`` channels between them."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return self.relu(out + x)


def resnet(inputs: int, classes: int, width: int) -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 14, 14)),
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        Block(16, width),
        Block(16, width),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, classes),
    )


class Logits(nn.Module):
    """A network of transformers that returns its logits only."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.network(input_ids=ids).logits
        return logits


def imported_transformers() -> Any:
    if find_spec("torchvision"):
        import_torchvision()  # it imports torchvision, which may fail with a CPU build of torch
    import transformers

    return transformers


def bert(inputs: int, classes: int, width: int) -> nn.Module:
    """A BERT of two layers with 32 features, whose feed-forward parts have ``width`` units."""
    transformers = imported_transformers()
    config = transformers.BertConfig(
        vocab_size=CHARACTERS,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=width,
        max_position_embeddings=inputs,
        num_labels=classes,
    )
    return Logits(transformers.BertForSequenceClassification(config))


def gpt2(inputs: int, classes: int, width: int) -> nn.Module:
    """A GPT-2 of two layers with 32 features, whose feed-forward parts have ``width`` units."""
    transformers = imported_transformers()
    config = transformers.GPT2Config(
        vocab_size=CHARACTERS,
        n_embd=32,
        n_layer=2,
        n_head=2,
        n_inner=width,
        n_positions=inputs,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Logits(transformers.GPT2LMHeadModel(config))


def table(name: str) -> tuple[np.ndarray, np.ndarray]:
    source = load_source(name)
    return source.x, source.y


def fashion() -> tuple[np.ndarray, np.ndarray]:
    """Fashion-MNIST at 14 × 14 pixels."""
    from esper.data.tasks import load_task

    split = load_task("fashion_mnist").train
    images = split.inputs(0, 6_000).double().numpy()[:, 0]
    small = images.reshape(-1, 14, 2, 14, 2).mean(axis=(2, 4))
    return small.reshape(len(small), -1), split.y[:6_000].numpy()


def signals() -> tuple[np.ndarray, np.ndarray]:
    """MNIST-1D: sequences of 40 numbers of ten kinds."""
    from mnist1d.data import get_dataset_args, make_dataset

    made = make_dataset(get_dataset_args())
    x = np.concatenate([made["x"], made["x_test"]])
    y = np.concatenate([made["y"], made["y_test"]])
    return x, y


NAMES = "argparse inspect tarfile typing subprocess pickle ast doctest optparse zipfile"
COMMENTS = (tokenize.COMMENT,)
STRINGS = (tokenize.STRING,)


def source_of(name: str, kinds: Sequence[int]) -> str:
    """Returns the tokens of these kinds in a module of the standard library."""
    path = Path(tokenize.__file__).with_name(f"{name}.py")
    lines = io.StringIO(path.read_text(encoding="utf-8")).readline
    tokens = tokenize.generate_tokens(lines)
    return " ".join(token.string for token in tokens if token.type in kinds)


def pieces(text: str, length: int, apart: int) -> Iterator[bytes]:
    for start in range(0, len(text) - length, apart):
        yield text[start : start + length].encode()[:length]


def texts() -> tuple[np.ndarray, np.ndarray]:
    """Comments and strings of ten modules of the standard library: pieces of 300 characters, as counts of 128 kinds of
    pairs of characters; the class is the module."""
    rows, labels = [], []
    for label, name in enumerate(NAMES.split()):
        text = source_of(name, COMMENTS + STRINGS)
        for piece in pieces(text, 300, 150):
            pairs = [(31 * a + b) % 128 for a, b in pairwise(piece)]
            rows.append(np.bincount(pairs, minlength=128))
            labels.append(label)
    return np.sqrt(np.array(rows)), np.array(labels)


def kinds() -> tuple[np.ndarray, np.ndarray]:
    """Pieces of the same modules, as characters; the class is comment, string, or code."""
    rows, labels = [], []
    for label, kept in enumerate((COMMENTS, STRINGS, (tokenize.NAME, tokenize.OP))):
        text = " ".join(source_of(name, kept) for name in NAMES.split())
        for piece in pieces(text, LENGTH, 100):
            rows.append(list(piece))
            labels.append(label)
    return np.array(rows) % CHARACTERS, np.array(labels)


def characters() -> tuple[np.ndarray, np.ndarray]:
    """Pieces of their comments and strings, as characters; the classes are the next ones."""
    text = " ".join(source_of(name, COMMENTS + STRINGS) for name in NAMES.split())
    rows = [list(piece) for piece in pieces(text, LENGTH + 1, 100)]
    x = np.array(rows) % CHARACTERS
    return x[:, :-1], x[:, 1:]


@dataclass(frozen=True)
class Case:
    load: Callable[[], tuple[np.ndarray, np.ndarray]]
    build: Callable[[int, int, int], nn.Module]
    """Makes a network of a number of inputs, of classes, and a width."""
    starts: tuple[int, int, int]
    """Widths that are too small, about right and too large."""
    widths: tuple[int, ...] = WIDTHS
    """Those of the sweep."""
    rate: float = 0.01
    seeds: int = 10


TABLES = ("spam", "vowel", "dna")
NARROW = WIDTHS[:-2]
TEXTS = (2, 4, 16, 32, 64, 256)
CASES = {
    **{name: Case(lambda name=name: table(name), mlp, (2, 16, 128)) for name in TABLES},
    "shuttle, deep": Case(lambda: table("shuttle"), deep_mlp, (2, 16, 64)),
    "fashion, flat": Case(fashion, mlp, (2, 16, 128)),
    "texts": Case(texts, mlp, (2, 16, 128)),
    "signals": Case(signals, signal_cnn, (1, 8, 32), NARROW),
    "fashion": Case(fashion, cnn, (1, 8, 32), NARROW, seeds=5),
    "fashion, ResNet": Case(fashion, resnet, (1, 8, 64), NARROW, seeds=5),
    "kinds, BERT": Case(kinds, bert, (2, 32, 256), TEXTS, 0.003, 5),
    "characters, GPT-2": Case(characters, gpt2, (2, 32, 256), TEXTS, 0.003, 5),
}


@cache
def rows_of(name: str) -> tuple[Tensor, Tensor]:
    """Returns the inputs of a case, float32 [n, inputs] or int64 [n, length], and classes, int64 [n] or [n, length]."""
    x, y = CASES[name].load()
    inputs = torch.from_numpy(np.asarray(x))
    return inputs if name.endswith(
        ("BERT", "GPT-2")
    ) else inputs.float(), torch.from_numpy(np.asarray(y)).long()
