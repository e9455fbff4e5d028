"""The output of `esper compare`: tables, verdicts and JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import TWO_EPOCHS, Esper


def test_compare_prints_a_row_an_arm_and_a_verdict_a_comparison(esper: Esper) -> None:
    found = esper(
        "compare",
        *TWO_EPOCHS,
        "--arm",
        "random",
        "--arm",
        "none",
        "--arm",
        "heuristic",
        "--pairs",
        "3",
    )
    assert found.code == 0
    lines = found.out.splitlines()
    table = next(i for i, line in enumerate(lines) if line.startswith("arm "))
    assert [line.split()[0] for line in lines[table + 1 : table + 4]] == [
        "random",
        "none",
        "heuristic",
    ]
    assert "3 pairs" in found.out
    words = " ".join(found.out.split())
    assert (
        "Differences are arm minus none" in words
    )  # the reference, wherever it was named
    assert "2 comparisons per metric (Holm)" in words
    assert (
        max(len(line) for line in lines if not line.startswith("Written to runs")) <= 80
    )
    assert found.out.count("inconclusive: under 10 pairs") == 2
    (folder,) = Path("runs").iterdir()
    names = {file.name for file in folder.iterdir()}
    assert {
        "results.json",
        "table.txt",
        "pairs.png",
        "differences.png",
        "cost.png",
    } <= names


@pytest.mark.usefixtures("no_plots")
def test_compare_of_one_pair_prints_no_nan(esper: Esper) -> None:
    found = esper(
        "compare", *TWO_EPOCHS, "--arm", "random", "--arm", "none", "--pairs", "1"
    )
    assert found.code == 0
    assert "nan" not in found.out
    assert "inf" not in found.out
    assert "1 pairs" not in found.out


@pytest.mark.usefixtures("no_plots")
def test_compare_writes_the_printed_results(esper: Esper) -> None:
    found = esper(
        "compare",
        *TWO_EPOCHS,
        "--arm",
        "random",
        "--arm",
        "none",
        "--pairs",
        "3",
        "--json",
        "o.json",
    )
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


@pytest.mark.usefixtures("no_plots")
def test_compare_writes_json_that_every_parser_reads(esper: Esper) -> None:
    """One pair has no spread and an interval without limits; JSON has neither NaN nor Infinity."""
    esper(
        "compare",
        *TWO_EPOCHS,
        "--arm",
        "random",
        "--arm",
        "none",
        "--pairs",
        "1",
        "--json",
        "o.json",
    )
    assert json.loads(Path("o.json").read_text(), parse_constant=_refuse)["pairs"] == 1


def _refuse(constant: str) -> Any:
    raise AssertionError(f"{constant} is no JSON")
