"""The controls static, bigger and same-compute: their hosts, and their fairness."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import nn

from esper.compare.arms import read_arms
from esper.compare.comparison import ComparisonResult
from esper.compare.comparison_run import ComparisonRun
from esper.compare.controls import StaticRunner
from esper.compare.runner import HostResult
from esper.config import ConfigError
from esper.data.task import Task
from esper.data.tasks import load_task
from esper.env.make import EnvMaker
from esper.hosts.graft import GraftedHost, graft
from esper.hosts.grown import KeptSeed
from esper.training.rng import seeded
from tests.core_helpers import EASY_GATES

OPS = ("GERMINATE", "ADVANCE", "ADVANCE", "ADVANCE", "FOSSILIZE")
SCHEDULE = "\n".join(
    f'[[action]]\nepoch = {epoch}\nop = "{op}"\nslot = "r0c1"\n'
    + ('blueprint = "conv_light"\ntempo = 3\n' if op == "GERMINATE" else "")
    for epoch, op in enumerate(OPS)
)
PLANT_ONLY = SCHEDULE.partition("\n\n")[0]
BASE: dict[str, Any] = {
    "task": {"samples_per_epoch": 64},
    "env": {
        "n_envs": 2,
        "episode_length": 9,
        "baseline_episodes": 1,
        "gates": EASY_GATES,
    },
}


def play(
    folder: Path, schedule: str, *texts: str, pairs: int = 2, **given: Any
) -> ComparisonResult:
    (folder / "s.toml").write_text(schedule)
    arms = read_arms([f"grown:controller=schedule:{folder / 's.toml'}", *texts], BASE)
    return ComparisonRun(arms, pairs, folder / "out", **given).run()


@cache
def grown() -> ComparisonResult:
    """Hosts that keep a convolution, beside all controls."""
    with TemporaryDirectory() as folder:
        return play(Path(folder), SCHEDULE, "static", "bigger", "same-compute", "none")


def test_the_grown_hosts_did_grow() -> None:
    assert [dict(host.kept) for host in grown().hosts["grown"]] == [
        {"r0c1": KeptSeed("conv_light", "LINEAR_ADD", 1.0)}
    ] * 2


def test_static_is_the_final_topology_of_its_pair() -> None:
    for ours, static in zip(
        grown().hosts["grown"], grown().hosts["static"], strict=True
    ):
        assert static.facts["built_in"] == {"r0c1": "conv_light"}
        assert (static.parameters, static.host_parameters) == (ours.parameters, 277)
        assert (static.epochs, static.fossils) == (ours.epochs, 0)


def test_bigger_has_the_nearest_size_and_says_how_near() -> None:
    for ours, bigger in zip(
        grown().hosts["grown"], grown().hosts["bigger"], strict=True
    ):
        assert bigger.facts["wanted_parameters"] == ours.parameters == 277 + 342
        assert (bigger.facts["width"], bigger.parameters, bigger.epochs) == (5, 635, 9)


def test_same_compute_is_the_host_alone_for_what_growing_computed() -> None:
    for ours, longer, alone in zip(
        *(grown().hosts[name] for name in ("grown", "same-compute", "none")),
        strict=True,
    ):
        assert longer.parameters == 277
        assert longer.epochs > 9
        an_epoch = alone.flops / 9
        assert abs(longer.flops - ours.flops) <= 0.51 * an_epoch
        assert longer.facts["wanted_flops"] == ours.flops > alone.flops


@pytest.mark.slow
def test_if_nothing_was_grown_static_and_bigger_equal_the_host_alone(
    tmp_path: Path,
) -> None:
    """Weights, batches and phases are the same; only the incubation of the pruned seed costs compute."""
    found = play(tmp_path, PLANT_ONLY, "static", "bigger", "none").hosts
    alone = [
        (host.accuracy, host.loss, host.flops, host.rollbacks) for host in found["none"]
    ]
    assert len(set(alone)) == 2  # two hosts, not one twice
    for name in ("static", "bigger"):
        assert [
            (host.accuracy, host.loss, host.flops, host.rollbacks)
            for host in found[name]
        ] == alone


def test_static_starts_from_the_initial_weights_of_the_host() -> None:
    maker = EnvMaker.of(read_arms(["random", "none"], BASE)[0].config)
    runner = StaticRunner(maker, "grown", 0)
    task, _, _ = runner.make(grown().hosts["grown"][0])
    with seeded(5):
        ours = task.build_host()
    with seeded(5):
        alone = load_task("digits").build_host()
    weights = ours.state_dict()
    for name, first in alone.state_dict().items():
        assert torch.equal(weights[f"host.{name}"], first)
    assert any(name.startswith("seeds.r0c1") for name in weights)


def of_width(width: int) -> GraftedHost:
    """A network of the user's own."""
    model = nn.Sequential(
        nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
        ),
        nn.Sequential(
            nn.LazyConv2d(width, 3, padding=1), nn.Dropout(0.1), nn.ReLU(inplace=True)
        ),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)),
    )
    return graft(model, {"r0c0": "0", "r0c1": "1"})


def mine() -> Task:
    """That network on the same digits."""
    return replace(load_task("digits"), name="mine", build_host=lambda: of_width(4))


def test_a_network_of_the_users_own_without_a_family_has_no_bigger_one(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match=r"arm 'bigger': cannot widen a GraftedHost"):
        play(tmp_path, SCHEDULE, "bigger", task=mine())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("control", ["static", "bigger", "same-compute"])
def test_simulated_hosts_have_no_controls(control: str, tmp_path: Path) -> None:
    arms = read_arms(["heuristic", control], {"task": {"name": "planted"}})
    with pytest.raises(
        ConfigError,
        match=f"arm '{control}': {control} trains a network, but hosts of planted are sim",
    ):
        ComparisonRun(arms, 2, tmp_path / "out")


def test_a_host_result_survives_json() -> None:
    for hosts in grown().hosts.values():
        for host in hosts:
            assert HostResult.parse(host.plain()) == host
