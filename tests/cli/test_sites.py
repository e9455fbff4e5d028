"""`esper sites`: where seeds can grow in a custom model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Esper

MINE = """
import torch
from torch import nn
from esper.data.tasks import load_task

def model():
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(4, 5)

def task():
    return load_task("digits_table")

def host():
    return load_task("digits")

def none():
    return nn.Flatten(), torch.randn(4, 5)

def wrong():
    return nn.Linear(5, 3)
"""


@pytest.fixture(autouse=True)
def mine(esper: Esper) -> None:
    Path("mine.py").write_text(MINE)


def test_sites_are_listed_with_what_they_cost(esper: Esper) -> None:
    found = esper("sites", "mine.py:model")
    assert (found.code, found.err) == (0, "")
    row = next(line for line in found.out.splitlines() if line.startswith("0 -> 2"))
    assert row.split()[3:6] == ["widen", "[N,", "D]"]
    assert "widen_whole 8 -> 16 units: 72, 128" in row
    assert 'sites="auto"' in found.out


def test_sites_are_printed_as_json(esper: Esper) -> None:
    found = esper("sites", "mine.py:model", "--json")
    assert [site["path"] for site in json.loads(found.out)] == ["1", "0 -> 2"]


@pytest.mark.parametrize(
    ("function", "path"), [("task", "0 -> 2"), ("host", "segments.0")]
)
def test_a_task_is_listed_by_its_host(esper: Esper, function: str, path: str) -> None:
    found = esper("sites", f"mine.py:{function}", "--json")
    assert found.code == 0, found.err
    assert path in [site["path"] for site in json.loads(found.out)]


def test_a_model_without_a_site_is_said_to_have_none(esper: Esper) -> None:
    assert (
        esper("sites", "mine.py:none").out
        == "No place was found where a seed could grow.\n"
    )


def test_another_result_is_refused_with_what_would_be_right(esper: Esper) -> None:
    found = esper("sites", "mine.py:wrong")
    assert found.code == 2
    assert "it returns Linear; it must return (model, example)" in found.err
    assert esper("sites", "mine.py:missing").code == 2
