"""Comparisons of controllers: every arm plays the same hosts, and no winner is named without evidence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from esper.compare.comparison import compare_controllers
from esper.config import ConfigError
from esper.env.no_growth import measure_baseline
from esper.telemetry.event import ArmPlayed
from tests.compare.arm_results import against
from tests.compare.tiny_comparisons import compare, tiny

INCUBATE = """
[[action]]
epoch = 0
op = "GERMINATE"
slot = "r0c0"
blueprint = "conv_light"

[[action]]
epoch = 1
op = "ADVANCE"
slot = "r0c0"
"""


@pytest.mark.finding("M14")
def test_pairs_are_equal_across_arms(tmp_path: Path) -> None:
    """A schedule that blends nothing has the hosts of the arm that does nothing: all pairs tie exactly."""
    (tmp_path / "s.toml").write_text(INCUBATE)
    name = f"schedule:{tmp_path / 's.toml'}"
    arms, _ = compare(["none", name], 2, tiny("digits", 128))
    assert arms[name].accuracy.tolist() == arms["none"].accuracy.tolist()
    assert (
        len(set(arms["none"].accuracy.tolist())) > 1
    )  # different hosts, not one twice
    (found,) = against(arms["none"], arms[name])
    assert (found.pair.ties, found.pair.difference, found.adjusted_p) == (2, 0.0, 1.0)


@pytest.mark.finding("M14")
def test_an_arm_does_not_depend_on_the_others() -> None:
    together, _ = compare(["none", "random", "heuristic"], 4)
    alone, _ = compare(["random", "none"], 4)
    for name in ("none", "random"):
        assert together[name].accuracy.tolist() == alone[name].accuracy.tolist()
        assert together[name].parameters.tolist() == alone[name].parameters.tolist()


def test_the_baseline_is_measured_once_and_is_that_of_a_run_of_the_same_seed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A policy sees the baseline of its training also on held-out hosts."""
    measured: list[int] = []

    def counting(
        task: Any, config: Any, executor: Any, run_seed: int, *rest: Any
    ) -> Any:
        measured.append(run_seed)
        return measure_baseline(task, config, executor, run_seed, *rest)

    monkeypatch.setattr("esper.env.vector_env.measure_baseline", counting)
    compare(
        ["none", "random"],
        2,
        tiny("digits", 64).with_values(run={"seed": 5}, env={"episode_length": 1}),
    )
    assert measured == [5]


def test_an_arm_named_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="given twice"):
        compare(["none", "random", "none"], 2)


def test_an_unknown_arm_is_refused_before_anything_is_played() -> None:
    events: list[ArmPlayed] = []
    with pytest.raises(
        ConfigError,
        match=r"unknown controller 'nope' \(did you mean 'none'\?\); known: ppo, checkpoint:PATH, pretrained",
    ):
        compare_controllers(tiny(), ["none", "nope"], 2, events.append)
    assert events == []


def test_an_untrained_agent_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="ppo must be trained before it can be compared"
    ):
        compare(["none", "ppo"], 2)
