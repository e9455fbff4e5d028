"""`--minutes` bounds how long tests are started; the whole suite runs on several cores, and a selection does not."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from tests.selection import slow_except

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("minutes", "result"),
    [("0", "3 skipped"), ("5", "3 passed"), ("0.02", "1 passed, 2 skipped")],
)
def test_no_test_is_started_after_the_minutes_have_passed(
    minutes: str, result: str, tmp_path: Path
) -> None:
    shutil.copy(ROOT / "conftest.py", tmp_path)
    (tmp_path / "test_it.py").write_text(
        "import time, pytest\n"
        "@pytest.mark.parametrize('number', range(3))\n"
        f"def test_it(number):\n    time.sleep({1.3 if minutes == '0.02' else 0})\n"
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rs",
        "-p",
        "no:cacheprovider",
        "--minutes",
        minutes,
        ".",
    ]
    found = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert found.stdout.splitlines()[-1].startswith(result)
    assert (f"not started: {minutes} minutes have passed" in found.stdout) == (
        "skipped" in result
    )


def test_with_minutes_every_test_comes_first_on_some_day() -> None:
    """Every test has its day, also the last ones, if a day runs a third of the list."""
    items = [f"test {number}" for number in range(30)]
    spec = importlib.util.spec_from_file_location(
        "conftest_of_the_root", ROOT / "conftest.py"
    )
    assert spec is not None
    assert spec.loader is not None
    conftest = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conftest)
    reached = set()
    for day in range(5):
        config, found = SimpleNamespace(getoption=lambda _: 3.0), list(items)
        with patch("time.time", return_value=86400.0 * (20_000 + day)):
            conftest.pytest_collection_modifyitems(config, found)
        assert sorted(found) == sorted(items)
        reached |= set(found[:10])
    assert reached == set(items)
    found = list(items)
    conftest.pytest_collection_modifyitems(
        SimpleNamespace(getoption=lambda _: None), found
    )
    assert found == items


@pytest.mark.parametrize(
    "arguments",
    slow_except([""], ["", "--cores tests", "-n 0", "-p no:xdist", "tests", "--pdb"]),
)
def test_the_whole_suite_runs_on_several_cores(arguments: str, tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    shutil.copy(ROOT / "conftest.py", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = tests\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text(
        "import os, pathlib, pytest\n"
        "@pytest.mark.parametrize('number', range(8))\n"
        "def test_it(number):\n"
        "    pathlib.Path('by ' + os.environ.get('PYTEST_XDIST_WORKER', 'one process')).touch()\n"
    )
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PYTEST_")
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        *arguments.split(),
    ]
    found = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stdout + found.stderr
    several = arguments in ("", "--cores tests") and len(os.sched_getaffinity(0)) > 1
    names = {path.name for path in tmp_path.glob("by *")}
    assert (names == {"by one process"}) is not several, names
    assert all(name.startswith("by gw") for name in names) is several, names


def test_other_parameters_of_a_product_are_slow() -> None:
    found = slow_except([("a", 1), ("b", 2)], [("a", 1), ("a", 2), ("b", 2)])
    assert [each.values for each in found] == [("a", 1), ("a", 2), ("b", 2)]
    assert [[mark.name for mark in each.marks] for each in found] == [[], ["slow"], []]
    with pytest.raises(ValueError, match="not among the parameters: \\['c'\\]"):
        slow_except(["a", "c"], ["a", "b"])
