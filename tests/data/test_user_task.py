"""A task in a user's Python file is loaded only if the user names it, never because a run folder does."""

from __future__ import annotations

from pathlib import Path

import pytest

from esper.config import ConfigError
from esper.data.tasks import build_host, load_task
from esper.data.user_task import confirmed_task, is_user_task


def test_the_function_makes_the_task(file: Path) -> None:
    name = f"{file}:make_task"
    task = load_task(name)
    assert (task.name, task.learning_rate, len(task.train)) == (name, 0.5, 997)
    assert build_host(name).parameter_count == 277


def test_a_path_is_relative_to_the_working_directory(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    assert load_task("mine.py:make_task").name == "mine.py:make_task"


def test_untrusted_code_is_not_run(tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text(f"open({str(tmp_path / 'executed')!r}, 'w').close()\n")
    name = f"{file}:make_task"
    for load in (load_task, build_host):
        with pytest.raises(ConfigError, match="name it: --task"):
            load(name, trusted=False)
        assert not (tmp_path / "executed").exists()
    with pytest.raises(ConfigError, match="no function"):
        load_task(name)
    assert (tmp_path / "executed").exists()  # trusted, it is


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("digits", False), ("cifar10_wide", False), ("planted", False), ("x.py:f", True), ("a/b.py", True), ("x:f", True)],
)
def test_names_of_files_are_distinguished_from_names_of_tasks(name: str, wanted: bool) -> None:
    assert is_user_task(name) is wanted


def test_a_run_of_a_user_task_resumes_when_the_task_is_named_again() -> None:
    assert confirmed_task("a.py:f", "a.py:f", "runs/x") == "a.py:f"
    assert confirmed_task("a.py:f", "elsewhere/a.py:f", "runs/x") == "elsewhere/a.py:f"
    assert confirmed_task("digits", None, "runs/x") == "digits"
    assert confirmed_task("digits", "digits", "runs/x") == "digits"
    for found, given, message in [
        ("a.py:f", None, "runs/x names the task 'a.py:f', which is Python code"),
        ("a.py:f", "digits", "a run of the task 'a.py:f', not of 'digits'"),
        ("a.py:f", "a.py:g", "not of 'a.py:g'"),
        ("digits", "a.py:f", "a run of the task 'digits', not of 'a.py:f'"),
    ]:
        with pytest.raises(ConfigError, match=message):
            confirmed_task(found, given, "runs/x")
