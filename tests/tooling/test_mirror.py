"""Tests have the names of their modules: `esper/a/b.py` is tested in `tests/a/test_b.py`."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import esper

PACKAGE = Path(esper.__file__).parent
TESTS = Path(__file__).parents[1]

TESTED_ELSEWHERE = {
    "bench/fixtures.py": "the hosts of cases: tests/bench/test_training.py",
    "config/task.py": "one property: tests/env/test_host_row.py",
    "core/reward_modes.py": "with their terms: tests/core/test_reward_terms.py, tests/core/test_telescoping.py",
    "env/drawn_hosts.py": "hosts of contexts: tests/env/test_varied.py",
    "env/backend.py": "an interface: tests/env/test_training_backend.py, tests/env/test_planted_backend.py",
    "grower/passes.py": "through loops: tests/grower/test_sites.py, tests/grower/test_merging.py",
    "show/learning.py": "with the other sections: tests/show/test_sections.py",
    "run/trainer.py": "through whole runs: tests/run/test_experiment.py, tests/run/test_resume.py",
    "telemetry/anomaly.py": "by updates of an agent: tests/agents/ppo/test_anomaly.py",
    "telemetry/record.py": "records of events: tests/telemetry/test_event.py",
    "telemetry/sink.py": "through the hub: tests/telemetry/test_hub.py",
    "telemetry/text.py": "through what is printed: tests/show/test_charts.py, tests/show/test_terminal.py",
    "training/native_layers.py": "in hosts: tests/training/test_native.py",
    "training/native_program.py": "in hosts: tests/training/test_native.py",
    "training/execution/graph_cache.py": "on fake and real GPUs: tests/training/execution/test_streams.py",
}
"""Modules without a test file of their name: the reason, and the tests."""


def has_functions(module: Path) -> bool:
    return any(
        isinstance(node, ast.FunctionDef)
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8")))
    )


def untested(package: Path, tests: Path) -> set[str]:
    """Modules with functions and without a test file of their name in the same folder of ``tests``.

    Tests of a subpackage's modules may be in the folder of its package.
    """
    found = set()
    for module in package.rglob("*.py"):
        name = module.relative_to(package)
        folders = [name.parent, *([name.parent.parent] if len(name.parts) > 2 else [])]
        if module.stem in ("__init__", "__main__") or not has_functions(module):
            continue
        if not any(
            (tests / folder / f"test_{name.stem.lstrip('_')}.py").exists()
            for folder in folders
        ):
            found.add(name.as_posix())
    return found


def test_a_module_has_a_test_file_of_its_name() -> None:
    assert untested(PACKAGE, TESTS) == set(TESTED_ELSEWHERE)
    assert len(TESTED_ELSEWHERE) <= 15


def test_tests_of_modules_without_a_file_of_their_name_exist() -> None:
    for module, reason in TESTED_ELSEWHERE.items():
        files = re.findall(r"tests/\S+\.py", reason)
        assert files, module
        assert all((TESTS.parent / file).exists() for file in files), module


def test_a_module_without_a_test_file_is_found(tmp_path: Path) -> None:
    texts = {
        "a/b.py": "def f(): ...",
        "a/_c.py": "def f(): ...",
        "a/d/e.py": "class E:\n    def f(self): ...",
        "a/d/g.py": "def f(): ...",
        "a/constants.py": "X = 1",
        "h.py": "def f(): ...",
    }
    for name, text in texts.items():
        (tmp_path / "p" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "p" / name).write_text(text)
    for name in ("a/test_c.py", "a/d/test_e.py", "a/test_g.py", "a/test_h.py"):
        (tmp_path / "t" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "t" / name).write_text("")
    assert untested(tmp_path / "p", tmp_path / "t") == {"a/b.py", "h.py"}
