"""The sections of a run: what each says of the events."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from esper.show.charts import Chart, Intervals, Table
from esper.show.learning import agent
from esper.show.page import answer
from esper.show.read import Run, open_run
from esper.show.sections import (
    MAX_HOSTS,
    accuracy,
    blueprints,
    contributions,
    gradients,
    happened,
    rewards,
    sections,
    time,
    verdict,
    warnings,
)
from esper.show.view import REST
from esper.telemetry.event import (
    ActionTaken,
    AgentValidated,
    AnomalyDetected,
    BaselineMeasured,
    Comparison,
    EpisodeCompleted,
    GateEvaluated,
    GovernorRollback,
    PolicyUpdated,
    RanksWaited,
    RoundCompleted,
    RunCompleted,
    RunResumed,
    ScoreDefined,
    StageChanged,
)
from tests.show.page_helpers import viewed
from tests.telemetry.sample_events import EPISODE, completed, epoch, started, updated


def table(blocks: list[Any], title: str) -> Table:
    """The table of that title."""
    (found,) = [block for block in blocks if getattr(block, "title", "") == title]
    assert isinstance(found, Table)
    return found


def charts(blocks: list[Any]) -> dict[str, Chart]:
    return {block.title: block for block in blocks if isinstance(block, Chart)}


def ended(*comparisons: Comparison, fossils: float = 1.5) -> RunCompleted:
    return RunCompleted("ppo", 16, comparisons, 277, 412.0, fossils, seconds=9.0)


def against(name: str, difference: float, p: float, verdict: str) -> Comparison:
    low, high = difference - 1.0, difference + 1.0
    return Comparison(name, 92.0, 90.0, difference, low, high, p, verdict)


NONE = against("none", 2.0, 0.0, "ppo is better by 2 (1 to 3)")


def test_the_answer_names_sizes_and_what_was_not_compared() -> None:
    view = viewed(started(), ended(against("random", 1.0, 0.2, "no evidence"), NONE))
    assert answer(view) == (
        "Growth helped: grown by ppo, hosts reached a test accuracy of 92.00 %, the same hosts left alone 90.00 %: "
        "+2.00 pp (95 % interval +1.00 to +3.00, p < 0.0001, 16 pairs), with 412 parameters instead of 277; hosts that "
        "have as many from the start were not compared."
    )


@pytest.mark.parametrize(
    ("difference", "verdict", "words"),
    [
        (-2.0, "none is better by 2 (1 to 3)", "Growth hurt: "),
        (0.2, "no evidence of a difference", "Whether growth helps is open: "),
        (5.0, "inconclusive: under 10 pairs", "Whether growth helps is open: "),
    ],
)
def test_the_answer_begins_with_the_verdict(
    difference: float, verdict: str, words: str
) -> None:
    view = viewed(started(), ended(against("none", difference, 0.04, verdict)))
    assert answer(view).startswith(words)
    assert "p = 0.0400" in answer(view)


def test_the_answer_of_a_run_without_seeds_or_without_a_comparison() -> None:
    assert "although no seed was kept" in answer(viewed(ended(NONE, fossils=0)))
    assert "no round is completed" in answer(viewed(started()))
    words = answer(viewed(started(), completed(3, test_accuracy=85.0)))
    assert words.startswith("Nothing was compared yet; after round 3 of 10")
    assert "test accuracy of 85.00 %" in words
    assert "alone 83.50 %" in words


def test_the_answer_says_whether_learning_helped() -> None:
    for said, words in (
        ("ppo is better by 2 (1 to 3)", "Learning made the agent better: +2.00 pp"),
        ("no evidence of a difference", "Whether learning helped is open: +2.00 pp"),
    ):
        itself = against("untrained", 2.0, 0.04, said)
        assert f". {words}" in answer(viewed(ended(NONE, itself)))
    worse = against("untrained", -2.0, 0.04, "untrained is better by 2 (1 to 3)")
    assert "Learning made the agent worse: -2.00" in answer(viewed(ended(NONE, worse)))
    assert "earning" not in answer(viewed(ended(NONE)))


def test_the_answer_has_no_p_where_all_pairs_are_the_same() -> None:
    same = against("none", 12.5, math.nan, "no verdict: the same in all 16 pairs")
    words = answer(viewed(started(), ended(same)))
    assert words.startswith("Whether growth helps is open: ")
    assert "+12.50 pp (no verdict: the same in all 16 pairs)" in words


def test_the_verdict_has_intervals_and_never_a_p_value_of_zero() -> None:
    intervals, found = verdict(viewed(started(), ended(NONE)))
    assert isinstance(intervals, Intervals)
    assert isinstance(found, Table)
    (row,) = intervals.rows
    assert (row.name, row.value, row.low, row.high) == ("none", 2.0, 1.0, 3.0)
    cells = ["none", "92.00", "90.00", "+2.00", "+1.00 to +3.00", "< 0.0001"]
    assert found.rows == [[*cells, "ppo is better by 2"]]
    assert found.words.startswith("16 pairs. ppo: trained once")
    (nothing,) = verdict(viewed(ended()))
    assert "Nothing was compared." in nothing.words  # type: ignore[union-attr]


def test_the_accuracy_of_a_round_counts_hosts_that_have_ended() -> None:
    """Host 2 ended after epoch 3, host 0 goes on: 74 and 70 %."""
    view = viewed(started(), epoch(0, 3), epoch(2, 3), epoch(0, 4))
    chart = charts(accuracy(view))["accuracy by epoch"]
    lines = {line.name: line for line in chart.lines}
    assert (list(lines["grown"].x), lines["grown"].y[-1]) == ([3, 4], 72.0)
    assert lines["without growth"].y[-1] == 60.0
    assert lines["without growth"].reference
    assert (lines["grown"].low[0], lines["grown"].high[0]) == (70.0, 74.0)


def test_before_the_first_epoch_the_baseline_is_drawn() -> None:
    view = viewed(started(), BaselineMeasured(8, (10.0, 82.5), (2.3, 0.6), 0.1))
    (line,) = charts(accuracy(view))["accuracy by epoch"].lines
    assert list(line.y) == [10.0, 82.5]
    assert accuracy(viewed(started())) == []


def test_rounds_are_shown_in_the_unit_of_the_score() -> None:
    view = viewed(started(), completed(1), completed(2))
    (grown, alone) = charts(accuracy(view))["accuracy by round"].lines
    assert (list(grown.y), list(alone.y)) == ([80.0, 81.0], [83.5, 83.5])
    view.handle(ScoreDefined("bits saved", "bit", 20.0))
    (grown, _) = charts(accuracy(view))["bits saved by round"].lines
    assert list(grown.y) == pytest.approx([4.0, 4.05])


def test_accuracy_by_class_has_hosts_left_alone_beside_the_newest_round(
    grown: Path,
) -> None:
    run = open_run(grown)
    newest = run.of(EpisodeCompleted)[-1].episode
    hosts = [e for e in run.of(EpisodeCompleted) if e.episode == newest]
    alone = run.of(BaselineMeasured)[-1].class_accuracy
    rows = table(accuracy(run.view), "Accuracy by class").rows
    assert [row[0] for row in rows] == list(map(str, range(10)))
    for number, row in enumerate(rows):
        grown_to = sum(e.class_accuracy[number] for e in hosts) / len(hosts)
        gain = grown_to - alone[number]
        assert row[1:] == [f"{alone[number]:.2f}", f"{grown_to:.2f}", f"{gain:+.2f}"]


def test_classes_without_samples_or_without_hosts_alone_have_no_row() -> None:
    baseline = BaselineMeasured(1, (80.0,), (0.5,), 0.1, (50.0, math.nan))
    host = dataclasses.replace(EPISODE, class_accuracy=(60.0, math.nan))
    rows = table(accuracy(viewed(baseline, host)), "Accuracy by class").rows
    assert rows == [["0", "50.00", "60.00", "+10.00"]]
    other = dataclasses.replace(host, env=1, class_accuracy=(60.0, 1.0, 2.0))
    assert (
        table(accuracy(viewed(baseline, host, other)), "Accuracy by class").rows == rows
    )
    assert "by class" not in str(accuracy(viewed(baseline, other)))
    old = dataclasses.replace(baseline, class_accuracy=())
    assert "by class" not in str(accuracy(viewed(old, host)))


def test_hosts_that_kept_nothing_have_no_row(grown: Path) -> None:
    run = open_run(grown)
    last = run.of(EpisodeCompleted)[-1]
    run.view.handle(dataclasses.replace(last, env=7, fossils={}))
    rows = table(accuracy(run.view), "Hosts that kept a seed").rows
    assert [row[0] for row in rows] == ["round 1, host 0", "round 1, host 1"]
    size = last.host_parameters + last.fossil_parameters
    assert rows[0][1] == f"{size:,}"
    assert rows[0][-1] == "r0c0 conv_light"


def test_hosts_are_listed_by_round_and_the_table_says_when_it_is_cut() -> None:
    view = viewed()
    for episode in range(2):
        for env in reversed(range(MAX_HOSTS)):
            view.handle(
                dataclasses.replace(
                    EPISODE, env=env, episode=episode, fossils={"r0c0": "norm"}
                )
            )
    found = table(accuracy(view), "Hosts that kept a seed")
    assert len(found.rows) == MAX_HOSTS
    assert [row[0] for row in found.rows[:2]] == ["round 2, host 0", "round 2, host 1"]
    assert found.words.endswith("100 of 200 hosts are shown.")


def test_a_seed_that_is_kept_at_once_has_no_contribution_by_then() -> None:
    planted = StageChanged(
        0, 0, 0, "r0c0", "widen_x4", "DORMANT", "FOSSILIZED", "germinate"
    )
    rows = table(blueprints(viewed(planted)), "Seeds by blueprint, all rounds").rows
    assert [row[-2] for row in rows] == ["kept at once", "kept at once"]


PRICED = ScoreDefined("return", "pp", 1.0, priced=True, of_reward=10.0)


def test_a_price_is_taken_off_test_scores_only() -> None:
    """Measurements during training are accuracies, in per cent."""
    view = viewed(started(), PRICED, epoch(0, 1))
    view.handle(completed(1, test_accuracy=None, alone_test_accuracy=None))
    found = charts(accuracy(view))
    assert found["accuracy by epoch"].y_label == "validation accuracy, %"
    assert found["accuracy by round"].y_label == "validation accuracy, %"
    assert "validation accuracy of 81.00 %" in answer(view)
    view.handle(completed(2))
    chart = charts(accuracy(view))["return by round"]
    assert chart.y_label == "test return, pp"
    assert "cannot be compared" in chart.words
    assert [line.connected for line in chart.lines] == [False, False]
    assert "test return of 81.00 pp" in answer(view)


def test_discounted_returns_are_in_pp_where_rewards_are_a_score() -> None:
    view = viewed(started(), completed(1), updated())
    plain = charts(agent(view))["discounted return"]
    assert (list(plain.lines[0].y), plain.y_label) == ([0.5], "discounted return")
    assert "cannot be compared" not in plain.words
    assert plain.lines[0].connected
    view.handle(PRICED)
    priced = charts(agent(view))["discounted return"]
    assert (list(priced.lines[0].y), priced.y_label) == ([5.0], "discounted return, pp")
    assert "cannot be compared" in priced.words
    assert not priced.lines[0].connected


def test_an_agent_that_is_never_validated_has_a_line_instead_of_a_curve() -> None:
    view = viewed(started(), completed(1), updated())
    assert any("ppo.validate_every" in str(block) for block in agent(view))
    view.handle(AgentValidated(1, 1.25, 1))
    assert not any("ppo.validate_every" in str(block) for block in agent(view))


def test_curves_are_of_the_same_hosts_when_short_episodes_end() -> None:
    """Host 1 has 72 % when it ends after epoch 1, host 0 has 70 % in every epoch."""
    view = viewed(epoch(0, 1), epoch(1, 1), epoch(0, 2), epoch(0, 3))
    (grown, *_) = charts(accuracy(view))["accuracy by epoch"].lines
    assert list(grown.y) == [71.0, 71.0, 71.0]
    assert list(grown.high) == [72.0, 72.0, 72.0]


def test_blueprints_that_were_never_kept_are_only_in_the_sum(grown: Path) -> None:
    view = open_run(grown).view
    found = view.blueprints.rows()
    rows = table(blueprints(view), "Seeds by blueprint, all rounds").rows
    assert [row[0] for row in rows] == ["conv_light", "all"]
    assert rows[0][1:3] == ["2", "2"]
    assert rows[1][1] == str(sum(row.germinated for row in found))
    assert blueprints(viewed(started())) == []


def test_contributions_are_those_of_the_newest_complete_round(grown: Path) -> None:
    view = open_run(grown).view
    rows = table(contributions(view), "Contributions of seeds").rows
    assert [row[:3] for row in rows] == [
        [f"host {env}", "r0c0", "conv_light"] for env in range(2)
    ]
    last = view.hosts[0]
    assert rows[0][3] == f"{last.contributions['r0c0']:+.2f}"
    share, error = view.of(EpisodeCompleted)[0].shapley["r0c0"]
    assert rows[0][4] == f"{share:+.2f} ± {error:.2f}"


def test_need_and_gradients_are_means_over_the_epochs_of_the_newest_round() -> None:
    told = []
    for number, value in ((1, 0.5), (2, 1.5)):
        told.append(
            dataclasses.replace(
                epoch(0, number),
                needs={"r2c0": value},
                gradients={"host": {"norm": value, "health": 1.0}},
            )
        )
    rows = table(gradients(viewed(*told)), "Need and gradients").rows
    assert rows == [
        ["host", "", "1.00", "", "1.00", "", ""],
        ["r2c0", "1.00", "", "", "", "", ""],
    ]
    assert gradients(viewed(epoch(0, 1))) == []


def test_updates_of_the_agent_are_drawn_by_round(learned: Path) -> None:
    view = open_run(learned).view
    updates = view.of(PolicyUpdated)
    found = charts(agent(view))
    for title, field in (("entropy", "entropy"), ("KL", "approx_kl")):
        (line,) = found[title].lines
        assert list(line.y) == [getattr(update, field) for update in updates]
    names = {line.name for line in found["Entropy of each head"].lines}
    assert names == set(updates[-1].head_entropies)
    (returns,) = found["discounted return"].lines
    assert list(returns.y) == [e.mean_return for e in view.of(RoundCompleted)]
    assert "discounted return on validation hosts" in found
    assert agent(viewed(started())) == []


def test_reward_terms_are_means_over_hosts() -> None:
    terms: list[dict[str, float]] = [{"gain": 1.0}, {"gain": 4.0, "rent": -1.0}]
    view = viewed(started())
    for env, of_host in enumerate(terms):
        view.handle(dataclasses.replace(epoch(env, 1), reward_terms=of_host))
    (chart,) = charts(rewards(view)).values()
    assert {line.name: list(line.y) for line in chart.lines} == {
        "gain": [2.5],
        "rent": [-0.5],
    }


def test_phases_are_added_over_rounds_the_longest_first() -> None:
    view = viewed(
        started(),
        completed(1, seconds=10.0, phase_seconds={"train": 6.0, "decide": 1.0}),
        completed(2, seconds=10.0, phase_seconds={"train": 4.0, "decide": 3.0}),
    )
    rows = table(time(view), "Seconds by phase, all rounds").rows
    shown = {row[0]: row[1:3] for row in rows}
    assert shown["train"] == ["10.0", "50%"]
    assert shown["decide"] == ["4.0", "20%"]
    assert shown[REST] == ["6.0", "30%"]
    assert rows[0][0] == "train"


def test_ranks_are_shown_with_the_share_that_they_waited() -> None:
    view = viewed(completed(1))
    assert len(time(view)) == 2
    for lap in (RanksWaited(1, 6.0, (0.5, 1.0)), RanksWaited(2, 4.0, (0.5, 3.0))):
        view.handle(lap)
    rows = table(time(view), "Waiting for other ranks, all rounds").rows
    assert rows == [["0", "1.0", "10.0%"], ["1", "4.0", "40.0%"]]


def test_a_warning_of_a_head_is_shown_once_with_its_newest_finding() -> None:
    def warned(number: int, head: str, found: str) -> AnomalyDetected:
        return AnomalyDetected(number, "entropy", head, 0.1, 0.3, found, "raise it")

    first = warned(1, "op", "hardly explores")
    view = viewed(first, warned(2, "op", "is certain"), warned(2, "slot", "too"))
    assert [shown.words for shown in warnings(view)] == [  # type: ignore[union-attr]
        "round 2, 2 times: is certain; try: raise it",
        "round 2: too; try: raise it",
    ]


def test_actions_gates_and_incidents_are_listed() -> None:
    view = viewed()
    for op, accepted in (("PRUNE", True), ("GERMINATE", False), ("PRUNE", True)):
        view.handle(ActionTaken(0, 0, 1, op, "r0c0", None, accepted, "shut"))
    for passed in (True, False, False):
        view.handle(GateEvaluated(0, 0, 1, "r0c0", "G1", passed, 0.0, ()))
    view.handle(GovernorRollback(3, 1, 7, "the loss rose", 9.0, 2.0, 5, 1))
    view.handle(RunResumed(4, 9, 8, 30, None, None, 0.0, epochs=2))
    blocks = happened(view)
    assert table(blocks, "Actions and gates").rows == [
        ["GERMINATE", "0", "1"],
        ["PRUNE", "2", "0"],
        ["G1", "1", "2"],
    ]
    rows = table(blocks, "Rollbacks, cut seeds, stops").rows
    assert rows[0][1] == "rollback"
    assert "the loss rose" in rows[0][2]
    assert rows[1][0] == "after round 4, 2 epochs into the next round"
    latest = table(blocks, "Latest events").rows
    assert latest[1][2] == "refused: shut"


def test_a_run_without_events_has_no_sections(tmp_path: Path) -> None:
    assert sections(Run(tmp_path, "empty").view) == {}
