"""Controls that compute as much as the grown host, and those that begin with a trained one."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from esper.compare.alternatives import CONTROLS
from esper.compare.arms import read_arms
from esper.compare.comparison import ComparisonResult
from esper.compare.comparison_run import ComparisonRun
from esper.config import ConfigError
from esper.data.task import Task
from esper.data.tasks import load_task
from tests.run.rank_helpers import ranks_of

SCHEDULE = """
[[action]]
epoch = 0
op = "GERMINATE"
slot = "r2c0"
blueprint = "widen_whole"
[[action]]
epoch = 1
op = "GERMINATE"
slot = "r2c1"
blueprint = "widen_half"
"""
NEW = (
    "static-compute",
    "bigger-compute",
    "uniform",
    "net2net",
    "ensemble",
    "distilled",
    "bigger-trained",
)


def play(
    folder: Path, *texts: str, base: dict[str, Any] | None = None, **given: Any
) -> ComparisonResult:
    (folder / "s.toml").write_text(SCHEDULE)
    task = {"start": "trained", "samples_per_epoch": 256, "data": str(folder / "data")}
    env = {"n_envs": 2, "episode_length": 6, "baseline_episodes": 1}
    arms = read_arms(
        [f"grown:controller=schedule:{folder / 's.toml'}", *texts],
        base or {"task": task, "env": env},
    )
    return ComparisonRun(arms, 2, folder / "out", reference="grown", **given).run()


def short() -> Task:
    return replace(load_task("digits"), episode_length=4)


@cache
def found() -> ComparisonResult:
    with TemporaryDirectory() as folder:
        return play(Path(folder), *NEW, "same-compute", "none", task=short())


@pytest.mark.parametrize("name", NEW)
def test_each_computes_as_much_as_the_grown_host(name: str) -> None:
    for ours, other in zip(found().hosts["grown"], found().hosts[name], strict=True):
        assert len(ours.kept) == 2
        an_epoch = other.flops / (other.epochs + 0.3)
        assert abs(other.flops - ours.flops) <= an_epoch


def test_the_hosts_start_where_the_host_alone_starts() -> None:
    from_new = min(host.accuracy for host in found().hosts["bigger-compute"])
    for name in ("net2net", "ensemble", "same-compute", "none", "bigger-trained"):
        assert all(host.accuracy > from_new for host in found().hosts[name]), name


def test_their_sizes() -> None:
    sizes = {name: hosts[0].parameters for name, hosts in found().hosts.items()}
    assert sizes["static-compute"] == sizes["grown"] > sizes["none"] == 277
    assert (
        sizes["net2net"]
        == sizes["bigger-compute"]
        == sizes["distilled"]
        == sizes["bigger-trained"]
        == 635
    )
    assert sizes["ensemble"] == 2 * 277


def test_uniform_has_one_blueprint_in_every_slot_of_a_row() -> None:
    for host in found().hosts["uniform"]:
        slots, names = (
            list(host.facts["built_in"]),
            set(host.facts["built_in"].values()),
        )
        row = slots[0][:2]
        assert slots == [f"{row}c0", f"{row}c1"]
        assert len(names) == 1


@pytest.mark.parametrize(
    "name", ["net2net", "ensemble", "distilled", "lora", "adalora"]
)
def test_those_that_begin_with_a_trained_host_need_one(
    name: str, tmp_path: Path
) -> None:
    with pytest.raises(
        ConfigError,
        match=f"arm '{name}': {name} begins with a host that was trained before",
    ):
        play(tmp_path, name, base={"env": {"n_envs": 2}})


def test_a_ceiling_has_a_first_training_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"bigger-trained has a first training, too: set task\.start to trained",
    ):
        play(tmp_path, "bigger-trained", base={"env": {"n_envs": 2}})


def test_the_seconds_of_each_arm_are_told() -> None:
    assert set(found().seconds) == set(found().hosts)
    assert all(seconds > 0 for seconds in found().seconds.values())


@pytest.mark.slow
def test_two_ranks_find_what_one_process_does(tmp_path: Path) -> None:
    with ranks_of(2) as ranks:
        base = {
            "task": {
                "start": "trained",
                "samples_per_epoch": 128,
                "data": str(tmp_path / "data"),
            },
            "env": {"n_envs": 2, "episode_length": 2, "baseline_episodes": 1},
        }
        spread = play(tmp_path, "net2net", "distilled", "none", base=base, ranks=ranks)
    with TemporaryDirectory() as folder:
        base["task"]["data"] = f"{folder}/data"
        assert (
            play(Path(folder), "net2net", "distilled", "none", base=base).hosts
            == spread.hosts
        )


def test_all_controls_are_named() -> None:
    assert set(CONTROLS) == {
        "static",
        "bigger",
        "same-compute",
        *NEW,
        "lora",
        "adalora",
    }
