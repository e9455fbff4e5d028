"""`chars`: character-level language modelling on the help texts that ship with Python.

The texts, and with them the vocabulary, differ slightly between versions of Python, so results and saved hosts belong
to one version.
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
"""Number of validation sequences: 16,384 characters, whose accuracy has a standard error below 0.5 pp and whose pass
costs a quarter of a training epoch. They are spread over the whole validation part, because its texts differ."""
UNKNOWN = 0
"""Token of characters that do not occur in the training part."""


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
        """Returns tokens, int64 [len(text)]."""
        number = {character: index + 1 for index, character in enumerate(self.known)}
        return torch.tensor([number.get(character, UNKNOWN) for character in text], dtype=torch.int64)

    def decode(self, tokens: Tensor) -> str:
        """Returns the text of tokens [N], with U+FFFD for unknown characters."""
        return "".join(self.known[token - 1] if token else "\ufffd" for token in tokens.tolist())


def read_text() -> str:
    """Joins all help texts, sorted by name."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def read_parts() -> list[str]:
    """Returns the training, validation and test text: disjoint, by position, about 80 / 10 / 10 %."""
    text = read_text()
    return [text[part] for part in cut_by_position(len(text), FRACTIONS)]


def host_of(vocabulary: int) -> TransformerHost:
    return TransformerHost(vocabulary=vocabulary, width=64, layers=2, heads=4, block=LENGTH, slots=2)


def build_host() -> TransformerHost:
    """Makes a transformer with two layers of width 64 and a slot after each."""
    return host_of(len(Characters.of(read_parts()[0])))


def load() -> Task:
    """Loads the task: sequences of 64 characters, 1,000 of them per epoch."""
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
        batch_size=8,  # with larger batches, an episode has too few SGD steps to learn more than pairs of characters
        samples_per_epoch=1_000,
        n_envs=4,
        episode_length=20,
        rounds=4,
        learning_rounds=25,
    )


DESCRIPTION = "characters of Python's help texts, embedded (80 / 10 / 10 % by position); transformer, 2 layers 64 wide"
