"""`tinystories`: short stories for a transformer of 30 million parameters, from files in the data folder.

``tinystories/`` contains either token files, ``train.bin`` and ``validation.bin`` (uint16, with the token of
``<|endoftext|>`` after each story), or texts, ``train.txt`` and ``validation.txt`` (stories separated by
``<|endoftext|>``), with GPT-2's ``tokenizer.json``. A text is tokenized once; from then on the token file is read.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from esper.config import ConfigError
from esper.data.registry import DataOptions
from esper.data.story_tokens import write_tokens
from esper.data.task import Split, Task
from esper.data.text import cut_by_position, evenly_spaced, windows
from esper.data.token_file import TokenFile, TokenWindows
from esper.hosts.transformer import TransformerHost

NAME = "tinystories"
VOCABULARY = 50_257
LENGTH = 256
MEASURED = 32
"""Number of sequences of 256 tokens for validation, and for test: 8,192 tokens, whose accuracy has a standard error
near 0.5 pp. There are no more because every epoch evaluates them once for each configuration of the seeds."""
PARTS = ("train", "validation")
HOME = "https://huggingface.co/datasets/roneneldan/TinyStories"
TOKENIZER_HOME = "https://huggingface.co/openai-community/gpt2"


def build_host() -> TransformerHost:
    """Makes a transformer with six layers of width 384 and a slot after every second one."""
    return TransformerHost(vocabulary=VOCABULARY, width=384, layers=6, heads=6, block=LENGTH, slots=3)


def load(options: DataOptions) -> Task:
    """Loads the task. Workers read training sequences from the file, because they may not fit in memory.

    Validation uses the first half of the validation stories, test the second half. Raises ConfigError for files that
    are missing or unusable.
    """
    try:
        train, validation = token_files(options.folder / NAME)
    except OSError as error:  # no permission to read or write, or a full disk
        raise ConfigError(f"{options.folder / NAME} cannot be used: {error}") from None
    held_out = torch.from_numpy(np.asarray(validation.tokens, dtype=np.int64))
    first, second = cut_by_position(len(held_out), (0.5, 0.5))
    if min(first.stop, len(held_out) - first.stop) <= LENGTH:
        raise ConfigError(f"{validation.path} has {len(held_out)} tokens; {2 * LENGTH + 2} or more are needed")
    sequences = TokenWindows(train, LENGTH)
    return Task(
        name=NAME,
        description=DESCRIPTION,
        classes=VOCABULARY,
        build_host=build_host,
        train=sequences,
        validation=_measured(held_out[first]),
        test=_measured(held_out[second]),
        learning_rate=0.1,
        batch_size=16,
        samples_per_epoch=min(1_024, len(sequences)),
        n_envs=2,
        episode_length=30,
        rounds=1,
        evaluation_batch=4,
        learning_rounds=25,
    )


def _measured(tokens: torch.Tensor) -> Split:
    return evenly_spaced(windows(tokens, LENGTH), MEASURED)


def token_files(folder: Path) -> tuple[TokenFile, TokenFile]:
    """Returns the training and validation tokens, after tokenizing texts that have no token file yet.

    Raises ConfigError if files are missing or unusable, or if a text is newer than its token file.
    """
    texts = [part for part in PARTS if not (folder / f"{part}.bin").is_file()]
    tokenizer = folder / "tokenizer.json"
    missing = [folder / f"{part}.txt" for part in texts if not (folder / f"{part}.txt").is_file()]
    if texts and not tokenizer.is_file():
        missing.append(tokenizer)
    if missing:
        raise ConfigError(_how_to_get(folder, missing))
    for part in PARTS:
        text, tokens = folder / f"{part}.txt", folder / f"{part}.bin"
        if part in texts:
            write_tokens(text, tokenizer, tokens, VOCABULARY)
        elif text.is_file() and text.stat().st_mtime > tokens.stat().st_mtime:
            raise ConfigError(f"{text} is newer than {tokens}, which is read in its place; delete one of them")
    train, validation = (TokenFile(folder / f"{part}.bin", VOCABULARY) for part in PARTS)
    return train, validation


def _how_to_get(folder: Path, missing: list[Path]) -> str:
    return "\n".join(
        [
            "TinyStories cannot be read:",
            *(f"  missing: {file}" for file in missing),
            f"It needs, in {folder}, train.txt and validation.txt with GPT-2's tokenizer.json, or token files "
            f"train.bin and validation.bin (uint16). They are not downloaded (task.download does nothing here).",
            f"Stories: {HOME} (TinyStoriesV2-GPT4-train.txt as train.txt, TinyStoriesV2-GPT4-valid.txt as "
            f"validation.txt). Tokenizer: {TOKENIZER_HOME}",
            "Another folder: --set task.data=FOLDER, or the environment variable ESPER_DATA.",
        ]
    )


DESCRIPTION = "short stories, from a local folder; transformer of 30,044,544 parameters, GPT-2's vocabulary"
