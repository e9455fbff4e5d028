"""Random numbers that a data set draws for itself, as augmentation does, out of the process's generators."""

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

GLOBAL_GENERATORS = threading.RLock()
"""The process has one of each, so runs in several threads take turns."""


def epoch_seed(rows: Tensor) -> int:
    """A seed of 63 bits for what is drawn for an epoch of these rows, int64 [count], in this order."""
    return int.from_bytes(hashlib.sha256(rows.contiguous().numpy().tobytes()).digest()[:8]) >> 1


@contextmanager
def drawing_from(seed: int) -> Iterator[None]:
    """Run with the generators of torch (the CPU's), NumPy and Python at ``seed`` and put them back afterwards."""
    # A worker has one thread; the lock may have been held by another of its parent's when it was forked.
    with nullcontext() if get_worker_info() is not None else GLOBAL_GENERATORS:
        python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002  rows may draw from it
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)  # noqa: NPY002
            try:
                yield
            finally:
                random.setstate(python)
                np.random.set_state(numpy)  # noqa: NPY002
