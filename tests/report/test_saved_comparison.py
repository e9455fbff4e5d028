"""The tables that a comparison has left in its folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from esper.config import ConfigError
from esper.report.saved_comparison import SETTINGS, TABLE, is_comparison, saved_tables


def test_a_folder_with_the_settings_of_a_comparison_is_one(tmp_path: Path) -> None:
    assert not is_comparison(tmp_path)
    (tmp_path / SETTINGS).write_text("{}")
    assert is_comparison(tmp_path)


def test_its_tables_are_those_that_it_printed(tmp_path: Path) -> None:
    (tmp_path / TABLE).write_text("ppo – 95.2 %\n", encoding="utf-8")
    assert saved_tables(tmp_path) == "ppo – 95.2 %\n"


def test_without_a_result_the_error_says_how_to_continue(tmp_path: Path) -> None:
    folder = tmp_path / "my comparison"
    folder.mkdir()
    with pytest.raises(ConfigError, match=rf"without a result yet.*esper compare --resume '{folder}'"):
        saved_tables(folder)
