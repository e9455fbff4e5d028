"""Settings of torch and numpy that hold for a whole thread or process, as training needs them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch


@contextmanager
def training_state() -> Iterator[None]:
    """Trains the same whatever the caller has set, and leaves the caller's settings as they were.

    Inside the block, or in a decorated function, gradients are on, new tensors are float32 and on the CPU, nothing is
    autocast, and numpy warns of invalid values instead of raising.
    """
    dtype = torch.get_default_dtype()
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(np.errstate(divide="warn", over="warn", under="ignore", invalid="warn"))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        if dtype != torch.float32:
            torch.set_default_dtype(torch.float32)
            stack.callback(torch.set_default_dtype, dtype)
        yield


@contextmanager
def outside_inference() -> Iterator[None]:
    """Makes tensors that can be trained inside the block, or in a decorated function, also if the caller is in
    ``torch.inference_mode()``; there, gradients stay off."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


@contextmanager
def kept_generators(devices: Iterable[torch.device] = ()) -> Iterator[None]:
    """Restores the global generators of torch (the CPU's and those of GPUs), NumPy and Python after a block."""
    python = random.getstate()
    numpy = np.random.get_state()  # noqa: NPY002  models, data sets and loops may draw from it
    try:
        with torch.random.fork_rng(devices=list(devices)):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
