"""Functions in a user's Python file: loading it, its neighbours, and its mistakes.

A task in such a file is loaded only if the user names it, never because a run folder does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from esper.config import ConfigError
from esper.data.tasks import build_host, load_task
from esper.data.user_code import is_user_task
from tests.data.user_files import GOOD


def test_an_edited_file_is_read_again(file: Path) -> None:
    load_task(f"{file}:make_task")
    file.write_text(
        GOOD.replace("rate: float = 0.5", "rate: float = 0.2")
    )  # as long as before
    assert load_task(f"{file}:make_task").learning_rate == 0.2
    assert [found.name for found in file.parent.iterdir()] == ["mine.py"]


WRONG = {
    "{folder}/gone.py:make_task": "there is no file",
    "{folder}/mine.py:gone": "it has no function gone",
    "{folder}/mine.py:number": "it has no function number",
    "{folder}/mine.py:fails": "line 20: ZeroDivisionError",
    "{folder}/mine.py:not_a_task": "returned dict, not an esper.data.task.Task",
    "{folder}/mine.py:unknown": "unknown task 'digit'",
    "{folder}/mine.py": "not of the form path.py:function",
    "{folder}/mine.py:": "not of the form path.py:function",
    "{folder}/mine.txt:make_task": "not of the form path.py:function",
    "digits:make_task": "not of the form path.py:function",
    "{folder}/raises.py:make_task": "line 2: KeyError: 'x'",
    "{folder}/leaves.py:make_task": "line 1: SystemExit",
    "{folder}/syntax.py:make_task": "line 1 is not Python",
    "{folder}/bytes.py:make_task": "bytes.py",
}


@pytest.mark.parametrize("name", WRONG)
def test_each_mistake_is_one_error(name: str, file: Path) -> None:
    folder = file.parent
    (folder / "raises.py").write_text("import os\n{}['x']\n")
    (folder / "leaves.py").write_text("raise SystemExit(0)\n")
    (folder / "syntax.py").write_text("def make_task(:\n")
    (folder / "bytes.py").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError) as caught:
        load_task(name.format(folder=folder))
    assert WRONG[name] in str(caught.value)
    assert str(caught.value).startswith(f"task '{name.format(folder=folder)}'")


@pytest.fixture
def import_state(tmp_path: Path) -> Iterator[None]:
    """Undoes what loading a file adds to ``sys.path`` and, of the test's files, to ``sys.modules``."""
    path = list(sys.path)
    yield
    sys.path[:] = path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


NEIGHBOURLY = """
from dataclasses import replace
from esper.data.tasks import load_task
import helpers


def make_task():
    import helpers_later
    return replace(load_task("digits"), learning_rate=helpers.RATE * helpers_later.FACTOR)
"""


def neighbourly(folder: Path, rate: float) -> str:
    folder.mkdir()
    (folder / "mine.py").write_text(NEIGHBOURLY)
    (folder / "helpers.py").write_text(
        f"from numbers_of_mine import ONE\nRATE = {rate} * ONE"
    )
    (folder / "numbers_of_mine.py").write_text("ONE = 1")
    (folder / "helpers_later.py").write_text("FACTOR = 2")
    return f"{folder}/mine.py:make_task"


@pytest.mark.usefixtures("import_state")
def test_a_file_imports_its_neighbours_at_once_and_later(tmp_path: Path) -> None:
    assert load_task(neighbourly(tmp_path / "a", 0.25)).learning_rate == 0.5


@pytest.mark.usefixtures("import_state")
def test_a_neighbour_is_never_confused_with_another_module_of_its_name(
    tmp_path: Path,
) -> None:
    load_task(neighbourly(tmp_path / "a", 0.25))
    with pytest.raises(
        ConfigError,
        match=rf"imports helpers, .* from {tmp_path}/a/helpers.py before: rename",
    ):
        load_task(neighbourly(tmp_path / "b", 0.5))


@pytest.mark.usefixtures("import_state")
def test_a_neighbour_of_a_neighbour_is_not_confused_either(tmp_path: Path) -> None:
    load_task(neighbourly(tmp_path / "a", 0.25))
    name = neighbourly(tmp_path / "b", 0.5)
    for file, text in {
        "mine.py": NEIGHBOURLY.replace("helpers", "other"),
        "other.py": "import numbers_of_mine",
    }.items():
        (tmp_path / "b" / file).write_text(text)
    with pytest.raises(
        ConfigError,
        match=rf"numbers_of_mine, .* from {tmp_path}/a/numbers_of_mine.py before",
    ):
        load_task(name)


@pytest.mark.usefixtures("import_state")
def test_a_mistake_in_a_neighbour_names_its_file(tmp_path: Path) -> None:
    name = neighbourly(tmp_path / "a", 0.25)
    (tmp_path / "a" / "helpers.py").write_text("RATE = = 1")
    with pytest.raises(ConfigError, match=r"SyntaxError: .*helpers\.py, line 1"):
        load_task(name)


def test_the_function_makes_the_task(file: Path) -> None:
    name = f"{file}:make_task"
    task = load_task(name)
    assert (task.name, task.learning_rate, len(task.train)) == (name, 0.5, 997)
    assert build_host(name).parameter_count == 277


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
    [
        ("digits", False),
        ("cifar10_wide", False),
        ("planted", False),
        ("x.py:f", True),
        ("a/b.py", True),
        ("x:f", True),
    ],
)
def test_names_of_files_are_distinguished_from_names_of_tasks(
    name: str, wanted: bool
) -> None:
    assert is_user_task(name) is wanted
