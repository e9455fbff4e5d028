"""Merging the parts of a comparison, played by machines that cannot talk to each other, into one folder."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from esper.config import ConfigError
from esper.evaluation.folder import FOLLOWED, PLAYED, SETTINGS, WHOLE, ComparisonFolder, Part, Settings
from esper.evaluation.runner import split_pairs
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
    parts = [(files, files.settings(controllers)) for files in map(ComparisonFolder, folders)]
    read = {files.path: files.read() for files, _ in parts}
    _check_same(read)
    _check_all_there([(files.path, settings.part) for files, settings in parts])
    lines = [line for files, settings in parts for line in _rounds_of(files, settings)]
    parent = target.absolute().parent
    with writable(target, "folder", "give another --out"):
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{target.name}-", dir=parent) as made:
            temporary = Path(made) / target.name
            temporary.mkdir()
            for folder in folders:
                for seed in sorted(folder.glob("seed-*")):
                    shutil.copytree(seed, temporary / seed.name)
            if (followed := folders[0] / FOLLOWED).exists():  # the same in all parts
                shutil.copytree(followed, temporary / FOLLOWED)
            write_atomic(temporary / PLAYED, b"".join(lines))
            write_json(temporary / "env.json", describe_environment())
            write_json(temporary / SETTINGS, {**read[folders[0]], "part": [1, 1]})
            temporary.rename(target)


def _check_same(files: dict[Path, dict[str, Any]]) -> None:
    """Raises ConfigError if the settings of two folders differ."""
    first, *others = files
    ours = dict(_leaves(files[first]))
    for folder in others:
        theirs = dict(_leaves(files[folder]))
        for place in {**ours, **theirs}:
            one, other = ours.get(place), theirs.get(place)
            if one != other and not MAY_DIFFER.match(place):
                raise ConfigError(f"{first} and {folder} are parts of two comparisons: {place} is {one} and {other}")


def _leaves(value: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Yields the place and the text of every value in nested tables and lists."""
    if not isinstance(value, dict | list):
        yield place, repr(value)
        return
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _leaves(inner, f"{place}.{key}" if place else str(key))


def _check_all_there(parts: Sequence[tuple[Path, Part]]) -> None:
    """Raises ConfigError unless ``parts`` are all parts of one comparison, each of them once."""
    have: dict[Part, Path] = {}
    for folder, part in parts:
        if part == WHOLE:
            raise ConfigError(f"{folder} is a whole comparison, not a part of one; esper compare --resume {folder}")
        if part in have:
            raise ConfigError(f"{have[part]} and {folder} are both {part}: give each part once")
        have[part] = folder
    counts = sorted({part.count for part in have})
    if len(counts) > 1:
        found = ", ".join(f"{folder} is {part}" for part, folder in have.items())
        raise ConfigError(f"these are not parts of one comparison: {found}")
    missing = [part for part in (Part(number + 1, counts[0]) for number in range(counts[0])) if part not in have]
    if missing:
        raise ConfigError(f"give the folders of all parts; missing: {', '.join(map(str, missing))}")


def _rounds_of(files: ComparisonFolder, settings: Settings) -> list[bytes]:
    """Returns the saved rounds of a part as lines. Raises ConfigError if it is not finished."""
    rounds, hosts = split_pairs(settings.pairs, int(settings.arms[0].config.env.n_envs or 0))
    seeds, own = settings.part.share(rounds, hosts, settings.train_seeds)
    wanted = {seed * rounds + number for seed in seeds for number in own}
    for arm, played in files.results([arm.name for arm in settings.arms]).items():
        if left := wanted - set(played):
            done = f"{len(wanted) - len(left)} of {len(wanted)} rounds of {arm} are played"
            raise ConfigError(f"{files.path} is not finished, {done}: esper compare --resume {files.path}")
    return [line + b"\n" for line in (files.path / PLAYED).read_bytes().splitlines()]
