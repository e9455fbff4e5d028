"""Signals that wait for the end of a block."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from esper.run.interrupt import (
    ENDS,
    SIGNALS,
    interrupts_end,
    interrupts_wait,
    termination_interrupts,
)


def test_a_signal_that_the_process_ignores_stays_ignored() -> None:
    """SIGINT is ignored in background jobs of a shell."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interrupts_wait():
        signal.raise_signal(signal.SIGINT)


def test_sigterm_is_ctrl_c_within_the_block_and_the_systems_outside() -> None:
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with pytest.raises(KeyboardInterrupt), termination_interrupts():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_users_signal_handler_is_kept() -> None:
    came: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: came.append(number))
    try:
        with termination_interrupts(), interrupts_wait():
            signal.raise_signal(signal.SIGTERM)
            assert came == []
        assert came == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_a_sigterm_that_repeats_the_first_does_not_stop_at_once() -> None:
    """The end of a job signals a rank and the launcher, which passes its signal on."""
    reached = []
    with (  # noqa: PT012
        termination_interrupts(),
        pytest.raises(KeyboardInterrupt),
        interrupts_wait(again=True),
    ):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        reached.append(True)
    assert reached


@pytest.mark.parametrize("again", [False, True])
def test_every_signal_that_waited_acts(again: bool) -> None:
    """A program that only takes note of one is stopped by the other all the same."""
    noted: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: noted.append(number))
    try:
        with pytest.raises(KeyboardInterrupt), interrupts_wait(again):  # noqa: PT012
            signal.raise_signal(signal.SIGTERM)
            assert noted == []
            signal.raise_signal(signal.SIGINT)
            assert not again
        assert noted == ([] if again else [signal.SIGTERM])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.fixture
def hang_up() -> Iterator[None]:
    """SIGHUP has its default action, also if the tests are run by nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hang_up")
def test_a_terminal_that_closes_interrupts_as_sigterm_does_unless_nohup_ignores_it() -> (
    None
):
    with pytest.raises(KeyboardInterrupt), termination_interrupts():
        signal.raise_signal(signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with termination_interrupts(), interrupts_wait():
        signal.raise_signal(signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


@pytest.fixture
def untouched() -> Iterator[None]:
    """Signals as in a shell: a caller such as nohup may ignore some."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in ENDS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("untouched")
def test_signals_before_any_work_are_the_systems_again_afterwards() -> None:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    with interrupts_end():
        assert len({signal.getsignal(number) for number in ENDS}) == 1
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    assert {number: signal.getsignal(number) for number in SIGNALS} == before


def test_a_signal_that_is_handled_or_ignored_before_any_work_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interrupts_end():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
