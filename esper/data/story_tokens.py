"""Tokenizes a text of stories into a file, story by story, without loading the whole text."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from esper.config import ConfigError

END = "<|endoftext|>"
READ = 1 << 20
"""Number of characters read at once."""
TOGETHER = 1_000
"""Number of stories tokenized at once."""


def write_tokens(text: Path, tokenizer_file: Path, out: Path, vocabulary: int) -> None:
    """Writes ``out`` atomically: uint16 tokens, with the token of ``<|endoftext|>`` after each story.

    Raises ConfigError if the tokenizer or the text is unusable, OSError if a file cannot be read or written.
    """
    tokenizer = _open(tokenizer_file, vocabulary)
    end = tokenizer.token_to_id(END)
    stories = _stories(text)
    unfinished = out.with_name(f"{out.name}.{os.getpid()}.part")
    try:
        with unfinished.open("wb") as file:
            while some := list(islice(stories, TOGETHER)):
                for encoding in tokenizer.encode_batch(some, add_special_tokens=False):
                    np.array([*encoding.ids, end], dtype="<u2").tofile(file)
        unfinished.replace(out)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{text} is not UTF-8 text: {error}") from None
    finally:
        unfinished.unlink(missing_ok=True)


def _open(file: Path, vocabulary: int) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ConfigError('tokenizing text needs the tokenizers package: pip install "esper[text]"') from None
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises Exception itself
        raise ConfigError(f"{file} is not a tokenizer.json: {error}") from None
    if tokenizer.token_to_id(END) is None:
        raise ConfigError(f"{file} has no token {END}; GPT-2's has")
    if tokenizer.get_vocab_size() > vocabulary:
        raise ConfigError(f"{file} has {tokenizer.get_vocab_size()} tokens; the host's vocabulary has {vocabulary}")
    return tokenizer


def _stories(text: Path) -> Iterator[str]:
    """Yields the stories between the separators, stripped of white space; empty ones are skipped."""
    rest = ""
    with text.open(encoding="utf-8") as file:
        while read := file.read(READ):
            *whole, rest = (rest + read).split(END)
            yield from filter(None, map(str.strip, whole))
    if rest.strip():
        yield rest.strip()
