"""A first use, from the installed command to a grown network in a program of the user."""

from __future__ import annotations

import json
import re
import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch

from esper.data.tasks import load_task
from esper.files.grown_host import accuracy, load_host
from tests.telemetry.sample_events import read_events

pytestmark = pytest.mark.slow

ESPER = Path(sysconfig.get_path("scripts")) / "esper"


@pytest.fixture(scope="module")
def first_light(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """`esper run` with the schedule that ships, ten hosts of nine epochs: what it printed, and its folder.

    Hosts learn slowly, so that growing pays in so few epochs.
    """
    folder = tmp_path_factory.mktemp("light")
    arguments = [
        "run",
        "--controller",
        "schedule",
        "--envs",
        "10",
        "--rounds",
        "1",
        "--episode-length",
        "9",
    ]
    slow = {
        "learning_rate": 0.05,
        "warmup_epochs": 0,
        "weight_decay": 5e-4,
        "label_smoothing": 0,
    }
    arguments += ["--set", "env.baseline_episodes=1"]
    arguments += [
        word
        for name, value in slow.items()
        for word in ("--set", f"task.{name}={value}")
    ]
    found = subprocess.run(
        [ESPER, *arguments], cwd=folder, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    (run,) = (folder / "runs").iterdir()
    return found.stdout, run


def test_growing_pays_and_the_run_says_so(first_light: tuple[str, Path]) -> None:
    out, folder = first_light
    *_, end = read_events(folder / "events.jsonl")
    assert end["pairs"] == 10
    (alone,) = end["comparisons"]
    assert alone["reference"] == "none"
    assert alone["low"] > 0
    assert re.search(r"^ +none .*\+\d+\.\d\d pp, .*: better$", out, re.MULTILINE)


def test_hosts_learn_and_seeds_are_kept(first_light: tuple[str, Path]) -> None:
    _, folder = first_light
    ended = [
        event
        for event in read_events(folder / "events.jsonl")
        if event["event"] == "EpisodeCompleted"
    ]
    assert len(ended) == 10
    assert all(event["epochs"] == 9 and event["rollbacks"] == 0 for event in ended)
    assert sum(bool(event["fossils"]) for event in ended) >= 8
    assert (
        sorted(event["committed_accuracy"] for event in ended)[5] > 60
    )  # chance is 10 %


def test_every_fossil_went_through_its_stages(first_light: tuple[str, Path]) -> None:
    _, folder = first_light
    ways: dict[tuple[int, str], list[str]] = {}
    for event in read_events(folder / "events.jsonl"):
        if event["event"] == "StageChanged":
            ways.setdefault((event["env"], event["slot"]), [event["before"]]).append(
                event["after"]
            )
    grown = [way for way in ways.values() if way[-1] == "FOSSILIZED"]
    tried, at_once = (
        ["GERMINATED", "TRAINING", "BLENDING", "HOLDING"],
        ["DORMANT", "FOSSILIZED"],
    )
    assert at_once in grown  # a widening changes nothing at first, and needs no trial
    assert all(way in (at_once, ["DORMANT", *tried, "FOSSILIZED"]) for way in grown)


def test_the_best_host_works_in_a_users_program(first_light: tuple[str, Path]) -> None:
    _, folder = first_light
    facts = json.loads((folder / "best_host.json").read_text())
    network, test = load_host(folder / "best_host"), load_task("digits").test
    assert accuracy(network, test.x, test.y) == facts["test_accuracy"]
    with torch.inference_mode():
        assert network(test.x[:5]).shape == (5, 10)
