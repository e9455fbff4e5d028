"""`chars`: a model of characters on the help texts that come with Python, so they are always there.

The texts differ a little between versions of Python, and with them the vocabulary: results, and saved hosts, belong to
one version.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from esper.data.task import Task
from esper.data.text import cut_by_position, evenly_spaced, windows
from esper.hosts.transformer import TransformerHost

LENGTH = 64
FRACTIONS = (0.8, 0.1, 0.1)
VALIDATION = 256
"""Sequences validated on: 16,384 characters, whose accuracy has a standard error below 0.5 pp and whose pass costs a
quarter of an epoch's. They are spread over all of the validation part, because its texts differ."""
UNKNOWN = 0
"""The token of a character that does not occur in the training part."""


@dataclass(frozen=True)
class Characters:
    """The vocabulary: token 0 is unknown, the others are characters by code point."""

    known: str

    @classmethod
    def of(cls, training_text: str) -> Characters:
        return cls("".join(sorted(set(training_text))))

    def __len__(self) -> int:
        return len(self.known) + 1

    def encode(self, text: str) -> Tensor:
        """Tokens int64 [len(text)]."""
        number = {character: index + 1 for index, character in enumerate(self.known)}
        return torch.tensor([number.get(character, UNKNOWN) for character in text], dtype=torch.int64)

    def decode(self, tokens: Tensor) -> str:
        """The text; U+FFFD where it is unknown."""
        return "".join(self.known[token - 1] if token else "\ufffd" for token in tokens.tolist())


def read_text() -> str:
    """All help texts in the order of their sorted names."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def read_parts() -> list[str]:
    """Training, validation and test text: by position, disjoint, about 80 / 10 / 10 %."""
    text = read_text()
    return [text[part] for part in cut_by_position(len(text), FRACTIONS)]


def host_of(vocabulary: int) -> TransformerHost:
    return TransformerHost(vocabulary=vocabulary, width=64, layers=2, heads=4, block=LENGTH, slots=2)


def build_host() -> TransformerHost:
    """Two layers, 64 wide, a slot after each."""
    return host_of(len(Characters.of(read_parts()[0])))


def load() -> Task:
    """Sequences of 64 characters; an epoch is 1,000 of them."""
    parts = read_parts()
    characters = Characters.of(parts[0])
    train, validation, test = (windows(characters.encode(part), LENGTH) for part in parts)
    vocabulary = len(characters)
    return Task(
        name="chars",
        description=DESCRIPTION,
        classes=vocabulary,
        build_host=lambda: host_of(vocabulary),
        train=train,
        validation=evenly_spaced(validation, VALIDATION),
        test=test,
        learning_rate=0.3,
        batch_size=8,  # an episode of larger batches is too few steps of SGD to learn more than pairs of characters
        samples_per_epoch=1_000,
        n_envs=4,
        episode_length=20,
        rounds=4,
        learning_rounds=25,
    )


DESCRIPTION = "characters of Python's help texts, embedded (80 / 10 / 10 % by position); transformer, 2 layers 64 wide"
