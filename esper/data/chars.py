"""`chars`: character-level language modelling on the help texts that ship with Python.

The texts, and with them the vocabulary, differ slightly between versions of Python, so results and saved hosts belong
to one version.
"""

from __future__ import annotations

import torch
from torch import Tensor

from esper.data.split import Split
from esper.data.task import Task
from esper.hosts.transformer import TransformerHost

DESCRIPTION = "characters of Python's help texts, embedded (80 / 10 / 10 % by position); transformer, 2 layers 64 wide"
LENGTH = 64
VALIDATION = 256
"""Number of validation sequences: 16,384 characters, whose accuracy has a standard error below 0.5 pp and whose pass
costs a quarter of a training epoch. They are spread over the whole validation part, because its texts differ."""
UNKNOWN = 0
"""Token of characters that do not occur in the training part."""


def read_text() -> str:
    """Joins all help texts, sorted by name."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def read_parts() -> tuple[str, str, str]:
    """Returns the training, validation and test text: disjoint, by position, about 80 / 10 / 10 %."""
    text = read_text()
    first = int(len(text) * 0.8)
    second = first + int(len(text) * 0.1)
    return text[:first], text[first:second], text[second:]


def vocabulary(training_text: str) -> dict[str, int]:
    """Returns the token of each character, from 1, by code point; token 0 is unknown."""
    return {character: number for number, character in enumerate(sorted(set(training_text)), start=1)}


def encode(text: str, tokens: dict[str, int]) -> Tensor:
    """Returns tokens, int64 [len(text)]."""
    return torch.tensor([tokens.get(character, UNKNOWN) for character in text], dtype=torch.int64)


def build_host(size: int | None = None) -> TransformerHost:
    """Makes a transformer with two layers of width 64 and a slot after each.

    ``size`` is the number of tokens; None reads it from the texts.
    """
    size = size or len(vocabulary(read_parts()[0])) + 1
    return TransformerHost(vocabulary=size, width=64, layers=2, heads=4, block=LENGTH, slots=2)


def load() -> Task:
    """Loads the task: sequences of 64 characters, 1,000 of them per epoch."""
    parts = read_parts()
    tokens = vocabulary(parts[0])
    train, validation, test = (Split.of_text(encode(part, tokens), LENGTH) for part in parts)
    size = len(tokens) + 1
    return Task(
        name="chars",
        description=DESCRIPTION,
        classes=size,
        build_host=lambda: build_host(size),
        train=train,
        validation=validation.evenly_spaced(VALIDATION),
        test=test,
        learning_rate=0.006,
        warmup_epochs=1.0,
        optimizer="adamw",  # 10 pp better than SGD at its best rate, 0.3 (benchmarks/results/chars_adamw.md)
        weight_decay=0.1,
        batch_size=8,  # with larger batches, an episode has too few steps
        samples_per_epoch=1_000,
        n_envs=4,
        episode_length=20,
    )
