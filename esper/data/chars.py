"""`chars`: character-level language modelling on the help texts that ship with Python.

The texts, and with them the vocabulary, differ slightly between versions of Python, so results and saved hosts belong
to one version.
"""

from __future__ import annotations

from esper.data.task import Task
from esper.data.text import Parts, character_host, character_task, vocabulary
from esper.hosts.transformer import TransformerHost

DESCRIPTION = "characters of Python's help texts, embedded (80 / 10 / 10 % by position); transformer, 2 layers 64 wide"


def read_text() -> str:
    """Joins all help texts, sorted by name."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def read_parts() -> Parts:
    """Returns the training, validation and test text: disjoint, by position, about 80 / 10 / 10 %."""
    text = read_text()
    first = int(len(text) * 0.8)
    second = first + int(len(text) * 0.1)
    return text[:first], text[first:second], text[second:]


def build_host() -> TransformerHost:
    """Makes the task's transformer, whose number of tokens is read from the texts."""
    return character_host(len(vocabulary(read_parts()[0])) + 1)


def load() -> Task:
    """Loads the task."""
    return character_task("chars", DESCRIPTION, read_parts())
