"""One owner for a folder: of two processes that write to it, the second one is refused."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from esper.config import ConfigError

logger = logging.getLogger(__name__)


@dataclass
class _Lock:
    descriptor: int
    users: int = 0


_LOCKS: dict[tuple[int, int], _Lock] = {}
"""Folders that this process owns, by device and inode: a loop that begins again in one takes over what it holds."""


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Owns ``folder`` in the block, and makes it if it does not exist. The claim ends with its process at the latest.

    Reading a folder needs no claim. Raises ConfigError if another process has claimed it, or if it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        status = folder.stat()
        place = status.st_dev, status.st_ino
        # All users in this process share a descriptor, because a second one would be refused.
        lock = _LOCKS.get(place)
        if lock is None:
            lock = _Lock(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror or error}; give another folder") from None
    if not lock.users:
        _take(folder, lock)
        _LOCKS[place] = lock
    lock.users += 1
    try:
        yield
    finally:
        lock.users -= 1
        if not lock.users:
            del _LOCKS[place]
            os.close(lock.descriptor)


def _take(folder: Path, lock: _Lock) -> None:
    """Locks a folder. Raises ConfigError if another process has locked it."""
    try:
        fcntl.flock(lock.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock.descriptor)
        raise ConfigError(
            f"{folder} belongs to a run in progress: give another folder, or wait until that run ends"
        ) from None
    except OSError as error:  # a file system without locks
        logger.warning("%s cannot be locked (%s): start no second run in it", folder, error.strerror)


def new_subfolder(parent: Path, name: str) -> Path:
    """Returns a new folder ``parent/name``, with a number behind the name if it is taken.

    Raises ConfigError if it cannot be written.
    """
    number = 1
    folder = parent / name
    while True:
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1
            folder = parent / f"{name}-{number}"
        except OSError as error:
            drop_if_empty(folder)
            raise ConfigError(f"{folder} cannot be written: {error.strerror or error}; give --out") from None


def require_empty(path: Path) -> None:
    """Raises ConfigError unless ``path`` is an empty folder or does not exist."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"{path} is not empty; give a new or empty folder")


def drop_if_empty(folder: Path) -> None:
    """Removes a folder, if it exists, and the one that it is in, if nothing was written to them."""
    for path in (folder, folder.parent):
        with suppress(OSError):  # it has content, or does not exist
            path.rmdir()
