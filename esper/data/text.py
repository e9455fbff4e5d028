"""Text as a task: characters, the vocabulary of a training text, and the host and the sizes of a character model."""

from __future__ import annotations

import torch
from torch import Tensor

from esper.data.split import Split
from esper.data.task import Task
from esper.hosts.transformer import TransformerHost

LENGTH = 64
"""Characters in a sequence."""
VALIDATION = 256
"""Number of validation sequences: 16,384 characters, whose accuracy has a standard error below 0.5 pp and whose pass
costs a quarter of a training epoch. They are spread over the whole validation part, because its texts differ."""
UNKNOWN = 0
"""Token of characters that do not occur in the training part."""

Parts = tuple[str, str, str]
"""Training, validation and test text, without a common passage."""


def vocabulary(training_text: str) -> dict[str, int]:
    """Returns the token of each character, from 1, by code point; token 0 is unknown."""
    characters = sorted(set(training_text))
    return {character: number for number, character in enumerate(characters, start=1)}


def encode(text: str, tokens: dict[str, int]) -> Tensor:
    """Returns tokens, int64 [len(text)]."""
    return torch.tensor([tokens.get(character, UNKNOWN) for character in text], dtype=torch.int64)


def character_host(size: int) -> TransformerHost:
    """Makes a transformer for ``size`` tokens, with two layers of width 64 and a slot after each."""
    return TransformerHost(
        vocabulary=size,
        width=64,
        layers=2,
        heads=4,
        block=LENGTH,
        slots=2,
    )


def character_task(
    name: str,
    description: str,
    parts: Parts,
    tokens: dict[str, int] | None = None,
) -> Task:
    """Makes the task of predicting the next character: sequences of 64 characters, 1,000 of them per epoch.

    ``tokens`` is the vocabulary; None: that of the training text.
    """
    tokens = tokens or vocabulary(parts[0])
    train, validation, test = (Split.of_text(encode(part, tokens), LENGTH) for part in parts)
    size = len(tokens) + 1
    return Task(
        name=name,
        description=description,
        classes=size,
        build_host=lambda: character_host(size),
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
