"""`esper info`, `esper tasks`, and the output of `esper compare`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from esper.config import TrainingConfig, describe_fields
from esper.rollout.policies import NAMES
from esper.seeds.blueprints import BLUEPRINTS

Esper = Callable[..., Any]

TINY = (
    "--envs",
    "2",
    "--episode-length",
    "2",
    "--set",
    "task.samples_per_epoch=64",
    "--set",
    "env.baseline_episodes=1",
)


def test_info_shows_each_module_and_the_command_that_repairs(esper: Esper) -> None:
    from esper.ops import _native

    out = esper("info").out
    for module in _native.modules():
        line = next(line for line in out.splitlines() if line.split()[:1] == [module.name])
        assert (str(module.path) if module.loaded else str(module.reason)) in line
    assert _native.REPAIR_COMMAND in out


def test_info_shows_the_capabilities_of_each_device(
    esper: Esper, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def told() -> str:
        return next(line for line in esper("info").out.splitlines() if line.split()[:1] == ["cpu"])

    compiler = tmp_path / "my-compiler"
    compiler.write_text("")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert "steps eager, compiled; no graph: graphs are CUDA's; auto precision is " in told()
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "steps eager; no compiled: there is no C++ compiler no-such-compiler; install it, " in told()
    for there, word in ((True, "bfloat16"), (False, "float32, it has no instructions for bfloat16")):
        monkeypatch.setattr("esper.training.precision.cpu_features", lambda there=there: {"avx512bf16": there})
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
        leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else [f"{prefix}{name}"]
        for name, value in tables.items()
    ]
    return [name for names in inner for name in names]


@pytest.mark.finding("M22")
def test_info_prints_every_parameter_with_its_meaning(esper: Esper) -> None:
    lines = esper("info", "--config").out.splitlines()
    fields = describe_fields(TrainingConfig)
    assert len(lines) == 2 * len(fields)
    assert sorted(name for name, _, _ in fields) == sorted(leaves(TrainingConfig().model_dump()))
    sections = {*TrainingConfig.model_fields}
    assert {line.partition(".")[0] for line in lines[::2]} == sections
    assert "ppo.episodes_per_update = None" in lines
    for (name, default, meaning), head, text in zip(fields, lines[::2], lines[1::2], strict=True):
        assert head == f"{name} = {default}"
        assert meaning, f"{name} has no manual"
        assert text.strip() == meaning


def test_info_prints_every_entry_of_the_observation(esper: Esper) -> None:
    from esper.data.tasks import load_task
    from esper.spaces.observation import ObservationLayout

    task = load_task("digits")
    host = task.build_host()
    layout = ObservationLayout(host.slot_names, BLUEPRINTS.names(host.topology), task.episode_length)
    lines = esper("info", "--observation").out.splitlines()
    assert len(lines) == layout.size
    assert [line.split()[2] for line in lines] == [entry.name for entry in layout.entries]


def test_tasks_lists_tasks_blueprints_and_controllers(esper: Esper) -> None:
    out = esper("tasks").out
    for name in ("digits", *BLUEPRINTS.names("cnn"), *NAMES):
        assert name in out


def test_compare_prints_a_row_an_arm_and_a_verdict_a_comparison(esper: Esper) -> None:
    found = esper("compare", *TINY, "--arm", "random", "--arm", "none", "--arm", "heuristic", "--pairs", "3")
    assert found.code == 0
    lines = found.out.splitlines()
    table = next(i for i, line in enumerate(lines) if line.startswith("arm "))
    assert [line.split()[0] for line in lines[table + 1 : table + 4]] == ["random", "none", "heuristic"]
    assert "3 pairs" in found.out
    words = " ".join(found.out.split())
    assert "Differences are arm minus none" in words  # the reference, wherever it was named
    assert "2 comparisons per metric (Holm)" in words
    assert max(len(line) for line in lines if not line.startswith("Written to runs")) <= 80
    assert found.out.count("inconclusive: under 10 pairs") == 2
    (folder,) = Path("runs").iterdir()
    names = {file.name for file in folder.iterdir()}
    assert {"results.json", "table.txt", "pairs.png", "differences.png", "cost.png"} <= names


def test_compare_of_one_pair_prints_no_nan(esper: Esper) -> None:
    found = esper("compare", *TINY, "--arm", "random", "--arm", "none", "--pairs", "1")
    assert found.code == 0
    assert "nan" not in found.out
    assert "inf" not in found.out
    assert "1 pairs" not in found.out


def test_compare_writes_the_printed_results(esper: Esper) -> None:
    found = esper("compare", *TINY, "--arm", "random", "--arm", "none", "--pairs", "3", "--json", "o.json")
    written = json.loads(Path("o.json").read_text(), parse_constant=_refuse)
    assert written["pairs"] == 3
    assert set(written["arms"]) == {"random", "none"}
    for arm in written["arms"].values():
        assert all(len(values) == 3 for values in arm["values"].values())
    mean = sum(written["arms"]["random"]["values"]["test_accuracy"]) / 3
    line = next(line for line in found.out.splitlines() if line.startswith("random "))
    assert line.split()[1] == f"{mean:.2f}"
    (told,) = written["metrics"][0]["comparisons"]
    assert told["verdict"] in found.out
    (folder,) = Path("runs").iterdir()
    assert (folder / "results.json").read_bytes() == Path("o.json").read_bytes()


def test_compare_writes_json_that_every_parser_reads(esper: Esper) -> None:
    """One pair has no spread and an interval without limits; JSON has neither NaN nor Infinity."""
    esper("compare", *TINY, "--arm", "random", "--arm", "none", "--pairs", "1", "--json", "o.json")
    assert json.loads(Path("o.json").read_text(), parse_constant=_refuse)["pairs"] == 1


def _refuse(constant: str) -> Any:
    raise AssertionError(f"{constant} is no JSON")
