"""Lines of lists, folded in a terminal only."""

from __future__ import annotations

import sys

import pytest

from esper.cli.info import echo_folded

LINE = "name   one two three four five"


def test_a_line_is_folded_between_words_in_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    echo_folded(LINE, 7)
    assert capsys.readouterr().out == "name   one two three\n       four five\n"
    echo_folded("https://a-word-that-is-longer-than-the-line", 2)
    assert capsys.readouterr().out == "https://a-word-that-is-longer-than-the-line\n"


def test_a_line_into_a_pipe_stays_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    echo_folded(LINE, 7)
    assert capsys.readouterr().out == LINE + "\n"
