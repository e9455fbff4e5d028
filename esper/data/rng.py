"""The process's global random generators, which data sets may use for augmentation."""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from esper.ops.torch_state import kept_generators

GLOBAL_GENERATORS = threading.RLock()
"""Serialises the use of the process's global generators by runs in several threads."""


def epoch_seed(rows: Tensor) -> int:
    """Returns a 63-bit seed for the random draws of an epoch, derived from its ordered rows, int64 [count]."""
    digest = hashlib.sha256(rows.contiguous().numpy().tobytes()).digest()
    return int.from_bytes(digest[:8]) >> 1


@contextmanager
def drawing_from(seed: int) -> Iterator[None]:
    """Seeds the global generators of torch (CPU), NumPy and Python for a block and restores them afterwards."""
    # A worker has one thread, and another thread of its parent may have held the lock at the fork.
    with nullcontext() if get_worker_info() is not None else GLOBAL_GENERATORS, kept_generators():
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        yield
