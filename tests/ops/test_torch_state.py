"""Settings of the process for torch and numpy neither reach training nor are changed by it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch

from esper.ops.torch_state import training_state


@contextmanager
def double_by_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def meta_by_default() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


STATES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no gradients": torch.no_grad,
    "inference mode": torch.inference_mode,
    "float64": double_by_default,
    "another device": meta_by_default,
    "another device, by a context": partial(torch.device, "meta"),
    "autocast": partial(torch.autocast, "cpu", torch.bfloat16),
    "invalid values raise": partial(np.errstate, all="raise"),
}
each = pytest.mark.parametrize("state", STATES)


def state_of_torch() -> tuple[object, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.is_autocast_enabled("cpu"),
        np.geterr()["invalid"],
    )


@each
def test_training_has_its_own_state_and_the_caller_gets_its_own_back(
    state: str,
) -> None:
    plain = (True, False, torch.float32, torch.device("cpu"), False, "warn")
    with STATES[state]():
        before = state_of_torch()
        assert before != plain
        with training_state():
            assert state_of_torch() == plain
            layer = torch.nn.Linear(3, 2)
            layer(torch.ones(4, 3)).sum().backward()
            assert layer.weight.grad is not None
            assert layer.weight.dtype == torch.float32
        assert state_of_torch() == before
        with pytest.raises(KeyError), training_state():
            raise KeyError
        assert state_of_torch() == before
    assert state_of_torch() == plain


def test_a_thread_has_the_same_state() -> None:
    found = []

    def look() -> None:
        with torch.no_grad(), training_state():
            found.append(state_of_torch())

    thread = Thread(target=look)
    thread.start()
    thread.join()
    with training_state(), warnings.catch_warnings():
        assert found == [state_of_torch()]
