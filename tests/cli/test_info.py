"""`esper info`: modules, devices, the configuration and the observation."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from esper.cli.info import echo_folded
from esper.config import TrainingConfig, describe_fields
from esper.core.blueprints import BLUEPRINTS

Esper = Callable[..., Any]


def test_info_shows_each_module_and_the_command_that_repairs(esper: Esper) -> None:
    from esper.ops import _native

    out = esper("info").out
    for module in _native.modules():
        line = next(
            line for line in out.splitlines() if line.split()[:1] == [module.name]
        )
        assert (str(module.path) if module.loaded else str(module.reason)) in line
    assert _native.REPAIR_COMMAND in out


def test_info_shows_the_capabilities_of_each_device(
    esper: Esper, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def told() -> str:
        return next(
            line
            for line in esper("info").out.splitlines()
            if line.split()[:1] == ["cpu"]
        )

    compiler = tmp_path / "my-compiler"
    compiler.write_text("")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert (
        "steps eager, native, compiled; no graph: graphs are CUDA's; auto precision is "
        in told()
    )
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert (
        "steps eager, native; no compiled: there is no C++ compiler no-such-compiler; install it, "
        in told()
    )
    for there, word in (
        (True, "bfloat16"),
        (False, "float32, it has no instructions for bfloat16"),
    ):
        monkeypatch.setattr(
            "esper.training.precision.cpu_features",
            lambda there=there: {"avx512bf16": there},
        )
        assert told().endswith(f"auto precision is {word}")


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ("1", "Fallbacks are errors (ESPER_REQUIRE_NATIVE is 1)"),
        ("0", "Fallbacks are allowed (ESPER_REQUIRE_NATIVE is not 1)"),
    ],
)
def test_info_shows_whether_a_fallback_is_an_error(
    value: str, line: str, esper: Esper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESPER_REQUIRE_NATIVE", value)
    assert line in esper("info").out.splitlines()


def leaves(tables: dict[str, Any], prefix: str = "") -> list[str]:
    """Dotted names of all values."""
    inner = [
        leaves(value, f"{prefix}{name}.")
        if isinstance(value, dict)
        else [f"{prefix}{name}"]
        for name, value in tables.items()
    ]
    return [name for names in inner for name in names]


@pytest.mark.finding("M22")
def test_info_prints_every_parameter_with_its_meaning(esper: Esper) -> None:
    lines = esper("info", "--config").out.splitlines()
    fields = describe_fields(TrainingConfig)
    assert len(lines) == 2 * len(fields)
    assert sorted(name for name, _, _ in fields) == sorted(
        leaves(TrainingConfig().model_dump())
    )
    sections = {*TrainingConfig.model_fields}
    assert {line.partition(".")[0] for line in lines[::2]} == sections
    assert "ppo.episodes_per_update = None" in lines
    for (name, default, meaning), head, text in zip(
        fields, lines[::2], lines[1::2], strict=True
    ):
        assert head == f"{name} = {default}"
        assert meaning, f"{name} has no manual"
        assert text.strip() == meaning


def test_info_prints_every_entry_of_the_observation(esper: Esper) -> None:
    from esper.core.observation import ObservationLayout
    from esper.data.tasks import load_task

    task = load_task("digits")
    host = task.new_host(task.slots)
    layout = ObservationLayout(
        host.slot_names,
        BLUEPRINTS.names(host.topology, host.sites),
        task.episode_length,
    )
    lines = esper("info", "--observation").out.splitlines()
    assert len(lines) == layout.size
    assert [line.split()[2] for line in lines] == [
        entry.name for entry in layout.entries
    ]


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


def test_an_output_that_does_not_know_whether_it_is_a_terminal_is_written_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Output:
        """Has what print() needs, as objects that programs put in the place of standard output."""

        def __init__(self) -> None:
            self.written: list[str] = []

        def write(self, text: str) -> int:
            self.written.append("" + text)  # takes no bytes
            return len(text)

        def flush(self) -> None:
            pass

    output = Output()
    monkeypatch.setattr(sys, "stdout", output)
    echo_folded("a line " * 40, 2)
    assert "".join(output.written) == "a line " * 40 + "\n"
