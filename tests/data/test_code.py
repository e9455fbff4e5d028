"""`code`: sources of the standard library, in disjoint files."""

from __future__ import annotations

from pathlib import Path

import pytest

from esper.config import ConfigError
from esper.data import code
from esper.data.tasks import build_host, load_task
from esper.data.text import LENGTH


def test_each_file_is_in_one_part_and_eight_of_ten_train() -> None:
    parts = code.read_parts()
    for place, file in ((0, 0), (0, 7), (1, 8), (2, 9)):
        text = (
            code.find_files()[file]
            .read_text(encoding="utf-8")
            .encode("ascii", "ignore")
            .decode("ascii")
        )
        assert [text in part for part in parts] == [
            place == other for other in range(3)
        ]
    sizes = [len(part) for part in parts]
    assert all(0.02 < size / sum(sizes) < 0.25 for size in sizes[1:])


def test_the_task_has_sequences_of_each_part_and_a_host_for_its_characters() -> None:
    task = load_task("code")
    assert task.train.x.shape[1] == LENGTH
    assert len(task.train) > 30 * len(task.validation)
    assert task.classes == len(set(code.read_parts()[0])) + 1 < 130
    host = task.build_host()
    assert host(task.sample).shape == (*task.sample.shape, task.classes)
    assert build_host("code").parameter_count == host.parameter_count


def test_a_python_without_its_sources_is_an_error_that_names_the_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    with pytest.raises(ConfigError, match=f"{tmp_path} has 0 sources"):
        load_task("code")
