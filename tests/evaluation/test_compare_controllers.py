"""Comparing controllers: every arm meets the same hosts, and no winner is named without evidence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from esper.config import ConfigError, TrainingConfig
from esper.env.no_growth import measure_baseline
from esper.evaluation.analysis import ArmComparison, corrected
from esper.evaluation.comparison import ArmResult, compare_controllers
from esper.evaluation.statistics import compare_pairs, holm_adjusted
from esper.telemetry.event import ArmPlayed
from tests.selection import slow_except

PLANT_ONLY = '[[action]]\nepoch = 0\nop = "GERMINATE"\nslot = "r0c0"\nblueprint = "conv_light"\n'
INCUBATE = PLANT_ONLY + '[[action]]\nepoch = 1\nop = "ADVANCE"\nslot = "r0c0"\n'
TOO_LATE = '[[action]]\nepoch = 999\nop = "PRUNE"\nslot = "r0c0"\n'


def tiny(n_envs: int = 2, **env: Any) -> TrainingConfig:
    """Hosts of four epochs on 256 images."""
    return TrainingConfig.parse(
        {
            "task": {"samples_per_epoch": 256},
            "env": {"n_envs": n_envs, "episode_length": 4, "baseline_episodes": 1, **env},
        }
    )


def compare(
    controllers: list[str], pairs: int, config: TrainingConfig | None = None
) -> tuple[dict[str, ArmResult], list[ArmPlayed]]:
    events: list[ArmPlayed] = []
    arms = compare_controllers(config or tiny(), controllers, pairs, events.append)
    return {arm.controller: arm for arm in arms}, events


@pytest.mark.finding("M14")
@pytest.mark.parametrize(
    "text", slow_except([INCUBATE], [TOO_LATE, PLANT_ONLY, INCUBATE]), ids=["nothing", "planted", "incubated"]
)
def test_pairs_are_equal_across_arms(text: str, tmp_path: Path) -> None:
    """A schedule that blends nothing leaves the very hosts of the arm that does nothing: all pairs tie exactly."""
    (tmp_path / "s.toml").write_text(text)
    name = f"schedule:{tmp_path / 's.toml'}"
    arms, _ = compare(["none", name], 4)
    assert arms[name].accuracy.tolist() == arms["none"].accuracy.tolist()
    assert len(set(arms["none"].accuracy.tolist())) > 1  # four different hosts, not one four times
    (found,) = against(arms["none"], arms[name])
    assert (found.pair.ties, found.pair.difference, found.adjusted_p) == (4, 0.0, 1.0)


@pytest.mark.finding("M14")
def test_an_arm_does_not_depend_on_the_others() -> None:
    together, _ = compare(["none", "random", "heuristic"], 4)
    alone, _ = compare(["random", "none"], 4)
    for name in ("none", "random"):
        assert together[name].accuracy.tolist() == alone[name].accuracy.tolist()
        assert together[name].parameters.tolist() == alone[name].parameters.tolist()


@pytest.mark.finding("M14")
def test_rounds_are_interleaved_in_random_order() -> None:
    arms, events = compare(["none", "random"], 12)
    assert {event.rounds for event in events} == {6}
    for name, arm in arms.items():
        means = [event.test_accuracy for event in events if event.controller == name]
        assert means == pytest.approx(arm.accuracy.reshape(6, 2).mean(axis=1))
    played = [(event.round, event.controller) for event in events]
    assert [number for number, _ in played] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]
    orders = [(played[i][1], played[i + 1][1]) for i in range(0, 12, 2)]
    assert set(orders) == {("none", "random"), ("random", "none")}


@pytest.mark.parametrize("pairs", slow_except([3], [1, 3, 4, 5]))
def test_every_arm_has_exactly_the_pairs_asked_for(pairs: int) -> None:
    arms, _ = compare(["none", "random"], pairs)
    for arm in arms.values():
        assert [len(values) for values in (arm.accuracy, arm.parameters, arm.fossils)] == [pairs] * 3


def test_the_baseline_is_measured_once_and_is_that_of_a_run_of_the_same_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy sees the baseline it learned beside, also where the hosts are held-out ones."""
    measured: list[int] = []

    def counting(task: Any, config: Any, executor: Any, run_seed: int, *rest: Any) -> Any:
        measured.append(run_seed)
        return measure_baseline(task, config, executor, run_seed, *rest)

    monkeypatch.setattr("esper.env.vector_env.measure_baseline", counting)
    compare(["none", "random", "heuristic"], 4, tiny().with_values(run={"seed": 5}))
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
    with pytest.raises(ConfigError, match="ppo must be trained before it can be compared"):
        compare(["none", "ppo"], 2)


def against(reference: ArmResult, *others: ArmResult) -> list[ArmComparison]:
    return corrected([other.against(reference) for other in others])


def arm(name: str, *accuracies: float) -> ArmResult:
    values = np.array(accuracies)
    return ArmResult(name, values, np.full(len(values), 277.0), np.zeros(len(values)))


BASE = [80.0 + i for i in range(10)]


@pytest.mark.finding("M14")
def test_p_values_are_corrected_for_all_comparisons() -> None:
    """Ten pairs that all differ by the same sign: exact p = 2 / 2^10. Holm over two comparisons: times 2, then 1."""
    better, same = arm("better", *(value + 1 for value in BASE)), arm("same", *BASE)
    found = {c.pair.name_a: c for c in against(arm("none", *BASE), better, same)}
    assert list(found) == ["better", "same"]
    assert found["better"].pair.p_value == 2 / 1024
    assert found["better"].adjusted_p == 2 * 2 / 1024
    assert found["same"].adjusted_p == 1.0
    assert found["better"].verdict.startswith("better is better by 1.00")
    assert found["same"].verdict == "no evidence of a difference"


def test_a_difference_lost_to_the_correction_is_not_a_win() -> None:
    """p = 0.0273 alone; with five comparisons it is 0.14, and the verdict follows the corrected one."""
    weak = [3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 1.0, -9.0]
    arms = [arm(f"arm{i}", *(b + w for b, w in zip(BASE, weak, strict=True))) for i in range(5)]
    alone = compare_pairs(arms[0].accuracy, np.array(BASE))
    found = against(arm("none", *BASE), *arms)
    assert [c.adjusted_p for c in found] == holm_adjusted([alone.p_value] * 5)
    assert found[0].adjusted_p == pytest.approx(min(1.0, 5 * alone.p_value))
    assert all(c.verdict == "no evidence of a difference" for c in found)


@pytest.mark.finding("M14")
def test_nine_pairs_name_no_winner() -> None:
    (found,) = against(arm("none", *BASE[:9]), arm("better", *(v + 5 for v in BASE[:9])))
    assert found.pair.wins == 9
    assert found.verdict == "inconclusive: under 10 pairs"


def test_a_worse_arm_is_reported_as_worse() -> None:
    (found,) = against(arm("none", *BASE), arm("worse", *(v - 2 for v in BASE)))
    assert found.verdict.startswith("none is better by 2.00")
