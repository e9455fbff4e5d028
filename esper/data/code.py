"""`code`: character-level language modelling on the sources of Python's standard library.

The sources, and with them the vocabulary, differ between versions of Python, so results and saved hosts belong to one
version.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

from esper.config import ConfigError
from esper.data.task import Task
from esper.data.text import Parts, character_host, character_task, vocabulary
from esper.hosts.transformer import TransformerHost

DESCRIPTION = "characters of the standard library's sources (80 / 10 / 10 % of files); transformer, 2 layers 64 wide"
TURN = 10
"""Of this many files in a row, by name, the last but one is for validation and the last for tests."""


def find_files() -> list[Path]:
    """Returns the modules at the top of the standard library, sorted by name. Raises ConfigError for too few."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py"))
    if len(files) < TURN:
        raise ConfigError(f"code: {folder} has {len(files)} sources; expected those of Python's standard library")
    return files


def read_parts() -> Parts:
    """Returns the training, validation and test text, of different files; characters beyond ASCII are left out."""
    train = []
    validation = []
    test = []
    for number, file in enumerate(find_files()):
        text = file.read_text(encoding="utf-8", errors="ignore")
        text = text.encode("ascii", "ignore").decode("ascii")
        place = number % TURN
        if place == TURN - 1:
            test.append(text)
        elif place == TURN - 2:
            validation.append(text)
        else:
            train.append(text)
    return "\n".join(train), "\n".join(validation), "\n".join(test)


def build_host() -> TransformerHost:
    """Makes the task's transformer, whose number of tokens is read from the sources."""
    return character_host(len(vocabulary(read_parts()[0])) + 1)


def load() -> Task:
    """Loads the task. Raises ConfigError if the sources are not there."""
    return character_task("code", DESCRIPTION, read_parts())
