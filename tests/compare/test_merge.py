"""Comparisons in parts, as machines play them that cannot talk to each other: merged, they are one comparison."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from esper.compare.arms import read_arms
from esper.compare.comparison_run import ComparisonRun
from esper.compare.folder import WHOLE, Part
from esper.compare.merge import merge
from esper.config import ConfigError

BASE: dict[str, Any] = {
    "task": {"name": "planted"},
    "env": {"n_envs": 2, "episode_length": 4},
    "run": {"seed": 4, "rounds": 1},
    "ppo": {"width": 8, "update_epochs": 1, "n_minibatches": 1, "practice_steps": 0},
}


PAIRS = 9


"""Rounds of two hosts, with one host too many."""


def compare(
    folder: Path, part: Part = WHOLE, pairs: int = PAIRS, **run: Any
) -> ComparisonRun:
    base = {**BASE, "run": {**BASE["run"], **run}}
    comparison = ComparisonRun(
        read_arms(("random", "heuristic", "none"), base), pairs, folder, part=part
    )
    comparison.run()
    return comparison


def found(folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = json.loads((folder / "results.json").read_text())
    del results["environment"]
    return results


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The folders of three parts of a comparison."""
    folder = tmp_path_factory.mktemp("parts")
    for number in (1, 2, 3):
        compare(folder / f"p{number}", Part(number, 3))
    return [folder / f"p{number}" for number in (1, 2, 3)]


def test_merged_parts_are_the_comparison_of_one_process(
    parts: list[Path], tmp_path: Path
) -> None:
    compare(tmp_path / "whole")
    merge([parts[2], parts[0], parts[1]], tmp_path / "merged")
    result = ComparisonRun.resume(tmp_path / "merged").run()
    assert result.pairs == PAIRS
    assert found(tmp_path / "merged") == found(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["merged", "whole"]


def test_a_part_plays_its_own_rounds_and_has_no_results(parts: list[Path]) -> None:
    played = {}
    for folder in parts:
        lines = (folder / "played.jsonl").read_text().splitlines()
        played[folder.name] = sorted({json.loads(line)["round"] for line in lines})
        assert not (folder / "results.json").exists()
    assert played == {"p1": [0, 3], "p2": [1, 4], "p3": [2]}


def played_in(folder: Path) -> list[tuple[str, int, list[object]]]:
    """Rounds that were played, by arm and number, without the seconds that they took."""
    rounds = map(json.loads, (folder / "played.jsonl").read_text().splitlines())
    return sorted((entry["arm"], entry["round"], entry["hosts"]) for entry in rounds)


def test_a_part_is_resumed(parts: list[Path], tmp_path: Path) -> None:
    shutil.copytree(parts[0], tmp_path / "cut")
    lines = (tmp_path / "cut" / "played.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "cut" / "played.jsonl").write_text("".join(lines[:3]))
    with pytest.raises(
        ConfigError,
        match=r"cut is not finished, 1 of 2 rounds of \w+ are played: esper compare --resume",
    ):
        merge([tmp_path / "cut", *parts[1:]], tmp_path / "merged")
    comparison = ComparisonRun.resume(tmp_path / "cut")
    assert (comparison.part, comparison.finished) == (Part(1, 3), False)
    comparison.run()
    assert comparison.finished
    assert played_in(tmp_path / "cut") == played_in(parts[0])


def test_agents_that_learn_on_two_machines_are_compared_as_on_one(
    tmp_path: Path,
) -> None:
    arms = read_arms(("ppo", "random"), BASE)
    for name, part in {"whole": WHOLE, "p1": Part(1, 2), "p2": Part(2, 2)}.items():
        ComparisonRun(arms, 2, tmp_path / name, train_seeds=3, part=part).run()
    seeds = {
        name: sorted(path.name for path in (tmp_path / name).glob("seed-*"))
        for name in ("p1", "p2")
    }
    assert seeds == {"p1": ["seed-4", "seed-6"], "p2": ["seed-5"]}
    merge([tmp_path / "p1", tmp_path / "p2"], tmp_path / "merged")
    result = ComparisonRun.resume(tmp_path / "merged").run()
    assert result.train_seeds == 3
    assert found(tmp_path / "merged") == found(tmp_path / "whole")
    assert (tmp_path / "merged" / "seed-5" / "0-ppo" / "checkpoint.pt").exists()


def test_merged_parts_have_what_their_arms_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("s.toml").write_text(
        '[[action]]\nepoch = 0\nop = "GERMINATE"\nslot = "r0c0"\nblueprint = "fern"\n'
    )
    arms = read_arms(("none", "schedule:s.toml"), BASE)
    for name, part in {"p1": Part(1, 2), "p2": Part(2, 2)}.items():
        ComparisonRun(arms, 4, name, part=part).run()
    Path("s.toml").unlink()
    merge([Path("p1"), Path("p2")], Path("merged"))
    assert list(ComparisonRun.resume("merged").run().hosts) == [
        "none",
        "schedule:s.toml",
    ]


WRONG: dict[str, tuple[Callable[[list[Path], Path], list[Path]], str]] = {
    "missing": (
        lambda parts, _: parts[:1],
        "give the folders of all parts; missing: part 2/3, part 3/3",
    ),
    "doubled": (
        lambda parts, _: [parts[0], *parts],
        "p1 and .*p1 are both part 1/3: give each part once",
    ),
    "none": (
        lambda _parts, _: [],
        r"--merge needs the folders of all parts: esper compare --merge FOLDER\.\.\.",
    ),
    "no folder": (
        lambda parts, other: [*parts, other / "x"],
        "x is not the folder of a comparison",
    ),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_incomplete_parts_are_refused(
    mistake: str, parts: list[Path], tmp_path: Path
) -> None:
    given, words = WRONG[mistake]
    with pytest.raises(ConfigError, match=words):
        merge(given(parts, tmp_path), tmp_path / "merged")
    assert list(tmp_path.iterdir()) == []


def test_parts_of_two_comparisons_are_refused(
    parts: list[Path], tmp_path: Path
) -> None:
    compare(tmp_path / "p1", Part(1, 3), seed=5)
    compare(tmp_path / "half", Part(1, 2))
    compare(tmp_path / "whole", pairs=2)
    with pytest.raises(
        ConfigError,
        match=r"are parts of two comparisons: arms\.0\.config\.run\.seed is 4 and 5",
    ):
        merge([*parts[1:], tmp_path / "p1"], tmp_path / "merged")
    with pytest.raises(
        ConfigError, match=r"these are not parts of one comparison: .*half is part 1/2"
    ):
        merge([*parts, tmp_path / "half"], tmp_path / "merged")
    with pytest.raises(
        ConfigError, match="are parts of two comparisons: pairs is 9 and 2"
    ):
        merge([*parts[1:], tmp_path / "whole"], tmp_path / "merged")
    with pytest.raises(
        ConfigError, match="whole is a whole comparison, not a part of one"
    ):
        merge([tmp_path / "whole"], tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_more_parts_than_rounds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match="a comparison of 5 rounds of 2 hosts has at most 5 parts, not 6",
    ):
        compare(tmp_path / "o", Part(1, 6))
    assert list(tmp_path.iterdir()) == []
