"""Number of threads that a run computes with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Limits torch to one intra-op thread, as in every worker.

    The agent is too small to benefit from more, threads waiting for each other are slow on a busy machine, and results
    must not depend on the thread count.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
