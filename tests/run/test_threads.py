"""Threads that a run computes with."""

from __future__ import annotations

from contextlib import suppress

import torch

from esper.run.rollout import one_thread


def test_a_block_has_one_thread_and_the_number_before_comes_back_after_an_error() -> (
    None
):
    torch.set_num_threads(2)  # the fixture of this folder resets it
    with suppress(ValueError), one_thread():
        assert torch.get_num_threads() == 1
        raise ValueError("inside")
    assert torch.get_num_threads() == 2
