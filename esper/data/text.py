"""Character-level language modelling: `chars` on the help texts of Python, `code` on the sources of its library.

Both texts, and with them the vocabulary, differ between versions of Python, so results and saved hosts belong to one
version.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

from esper.config import ConfigError
from esper.data.split import Split
from esper.data.task import Task
from esper.hosts.transformer import TransformerHost

CHARS = "characters of Python's help texts, embedded (80 / 10 / 10 % by position); transformer, 2 layers 64 wide"
CODE = "characters of the standard library's sources (80 / 10 / 10 % of files); transformer, 2 layers 64 wide"
LENGTH = 64
"""Characters in a sequence."""
VALIDATION = 256
"""Number of validation sequences: 16,384 characters, whose accuracy has a standard error below 0.5 pp and whose pass
costs a quarter of a training epoch. They are spread over the whole validation part, because its texts differ."""
UNKNOWN = 0
"""Token of characters that do not occur in the training part."""
TURN = 10
"""Of this many source files in a row, by name, the last but one is for validation and the last for tests."""

Parts = tuple[str, str, str]
"""Training, validation and test text, without a common passage."""


def help_texts() -> str:
    """Joins all help texts of Python, sorted by name."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def chars_parts() -> Parts:
    """Returns the parts of the help texts: disjoint, by position, about 80 / 10 / 10 %."""
    text = help_texts()
    first = int(len(text) * 0.8)
    second = first + int(len(text) * 0.1)
    return text[:first], text[first:second], text[second:]


def source_files() -> list[Path]:
    """Returns the modules at the top of the standard library, sorted by name. Raises ConfigError for too few."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py"))
    if len(files) < TURN:
        raise ConfigError(f"code: {folder} has {len(files)} sources; expected those of Python's standard library")
    return files


def code_parts() -> Parts:
    """Returns the parts of the sources, of different files; characters beyond ASCII are left out."""
    texts = []
    for file in source_files():
        text = file.read_text(encoding="utf-8", errors="ignore")
        texts.append(text.encode("ascii", "ignore").decode("ascii"))
    held_out = (TURN - 2, TURN - 1)
    train = [text for number, text in enumerate(texts) if number % TURN not in held_out]
    return "\n".join(train), "\n".join(texts[held_out[0] :: TURN]), "\n".join(texts[held_out[1] :: TURN])


def vocabulary(training_text: str) -> dict[str, int]:
    """Returns the token of each character, from 1, by code point; token 0 is unknown."""
    characters = sorted(set(training_text))
    return {character: number for number, character in enumerate(characters, start=1)}


def encode(text: str, tokens: dict[str, int]) -> Tensor:
    """Returns tokens, int64 [len(text)]."""
    return torch.tensor([tokens.get(character, UNKNOWN) for character in text], dtype=torch.int64)


def character_host(parts: Parts) -> TransformerHost:
    """Makes the host of :func:`character_task`, whose number of tokens is read from the training text."""
    return _host_for(len(vocabulary(parts[0])) + 1)


def _host_for(tokens: int) -> TransformerHost:
    return TransformerHost(
        vocabulary=tokens,
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

    ``tokens`` is the vocabulary; None: that of the training text. The host is a transformer with two layers of width 64
    and a slot after each.
    """
    tokens = tokens or vocabulary(parts[0])
    train, validation, test = (Split.of_text(encode(part, tokens), LENGTH) for part in parts)
    size = len(tokens) + 1
    return Task(
        name=name,
        description=description,
        classes=size,
        build_host=lambda: _host_for(size),
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
