"""Merging the parts of a comparison, played by machines that cannot talk to each other, into one folder."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from esper.compare.folder import FOLLOWED, PLAYED, SETTINGS, WHOLE, ComparisonFolder, Part, Settings
from esper.compare.runner import split_pairs
from esper.config import ConfigError
from esper.files.atomic import write_atomic, write_json
from esper.files.run_folder import require_empty, writable
from esper.files.system_info import describe_environment

MAY_DIFFER = re.compile(r"part\.|arms\.\d+\.config\.(task\.data|run\.(device|lanes))$")
"""Settings that parts of one comparison need not share: where a machine has its data, and what it trains on."""


def merge(folders: Sequence[Path], target: Path, controllers: Sequence[str] = ()) -> None:
    """Writes the comparison whose parts are ``folders`` to ``target``, ready to be analysed.

    Args:
        target: a new or empty folder.
        controllers: the user-defined controllers of the arms, named again by the user.

    Raises ConfigError if a part is missing, given twice or unfinished, or belongs to another comparison.
    """
    if not folders:
        raise ConfigError("--merge needs the folders of all parts: esper compare --merge FOLDER...")
    require_empty(target)
    files = list(map(ComparisonFolder, folders))
    settings = [part.settings(controllers) for part in files]  # checked; those below are as they were written
    saved = {part.path: part.read() for part in files}
    _check_same(saved)
    _check_complete(folders, settings)
    rounds = b"".join(map(_rounds_of, files, settings))

    parent = target.absolute().parent
    with writable(target, "folder", "give another --out"):
        parent.mkdir(parents=True, exist_ok=True)
        # Everything is written beside the target first, which then appears at once.
        with tempfile.TemporaryDirectory(prefix=f"{target.name}-", dir=parent) as beside:
            temporary = Path(beside) / target.name
            temporary.mkdir()
            for folder in folders:
                for seed in sorted(folder.glob("seed-*")):
                    shutil.copytree(seed, temporary / seed.name)
            followed = folders[0] / FOLLOWED  # the same in all parts
            if followed.exists():
                shutil.copytree(followed, temporary / FOLLOWED)
            write_atomic(temporary / PLAYED, rounds)
            write_json(temporary / "env.json", describe_environment())
            write_json(temporary / SETTINGS, {**saved[folders[0]], "part": [1, 1]})
            temporary.rename(target)


def _check_same(saved: dict[Path, dict[str, Any]]) -> None:
    """Raises ConfigError if the settings of two folders differ."""
    first, *others = saved
    ours = dict(_leaves(saved[first]))
    for folder in others:
        theirs = dict(_leaves(saved[folder]))
        for place in {**ours, **theirs}:
            # None where one of them has no such value.
            our_value = ours.get(place)
            their_value = theirs.get(place)
            if our_value != their_value and not MAY_DIFFER.match(place):
                raise ConfigError(
                    f"{first} and {folder} are parts of two comparisons: {place} is {our_value} and {their_value}"
                )


def _leaves(value: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Yields the place and the text of every value in nested tables and lists."""
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    else:
        yield place, repr(value)
        return
    for key, inner in items:
        yield from _leaves(inner, f"{place}.{key}" if place else str(key))


def _check_complete(folders: Sequence[Path], settings: Sequence[Settings]) -> None:
    """Raises ConfigError unless ``folders``, with these settings, are all parts of a comparison, each of them once."""
    folder_of: dict[Part, Path] = {}
    for folder, of_part in zip(folders, settings, strict=True):
        part = of_part.part
        if part == WHOLE:
            raise ConfigError(f"{folder} is a whole comparison, not a part of one; esper compare --resume {folder}")
        if part in folder_of:
            raise ConfigError(f"{folder_of[part]} and {folder} are both {part}: give each part once")
        folder_of[part] = folder
    counts = {part.count for part in folder_of}
    if len(counts) > 1:
        named = ", ".join(f"{folder} is {part}" for part, folder in folder_of.items())
        raise ConfigError(f"these are not parts of one comparison: {named}")
    (count,) = counts
    missing = []
    for number in range(1, count + 1):
        part = Part(number, count)
        if part not in folder_of:
            missing.append(str(part))
    if missing:
        raise ConfigError(f"give the folders of all parts; missing: {', '.join(missing)}")


def _rounds_of(files: ComparisonFolder, settings: Settings) -> bytes:
    """Returns the lines of the saved rounds of a part. Raises ConfigError if it is not finished."""
    n_envs = int(settings.arms[0].config.env.n_envs or 0)
    rounds, hosts = split_pairs(settings.pairs, n_envs)
    seeds, shared_rounds = settings.part.share(rounds, hosts, settings.train_seeds)
    # Rounds of all training seeds are counted through.
    wanted = {seed * rounds + number for seed in seeds for number in shared_rounds}
    names = [arm.name for arm in settings.arms]
    for arm, played in files.results(names).items():
        left = wanted - set(played)
        if left:
            done = f"{len(wanted) - len(left)} of {len(wanted)} rounds of {arm} are played"
            raise ConfigError(f"{files.path} is not finished, {done}: esper compare --resume {files.path}")
    # Whole lines only: the look at the results has removed an incomplete last one.
    return (files.path / PLAYED).read_bytes()
