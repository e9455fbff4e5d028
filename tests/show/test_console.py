"""The run as plain lines."""

from __future__ import annotations

import io
import math
from dataclasses import replace

import pytest
from rich.console import Console

from esper.show.console import ConsoleSink
from esper.telemetry.event import (
    AgentValidated,
    AnomalyDetected,
    ArmPlayed,
    Event,
    GovernorRollback,
    RunResumed,
    ScoreDefined,
    StepsNotCaptured,
)
from tests.telemetry.sample_events import completed, cut, epoch, started, updated


def printed(*events: Event, width: int = 40) -> list[str]:
    """Lines printed to a narrow console that is not a terminal."""
    stream = io.StringIO()
    sink = ConsoleSink(Console(file=stream, width=width))
    for event in events:
        sink.handle(event)
    sink.close()
    return stream.getvalue().splitlines()


def test_the_header_describes_the_run() -> None:
    first, *others = printed(started())
    assert first == ("ppo will grow 96 hosts on digits: 12 rounds of 8, 30 epochs each")
    text = "\n".join(others)
    assert "seed 7; host: 6,418 parameters" in text
    assert "simulated" not in text
    for part in ("r0c0, r0c1", "conv_light, norm", "runs/a"):
        assert part in text


def test_rounds_are_beside_hosts_left_alone_unless_an_agent_learns() -> None:
    first, *_ = printed(replace(started(), controller="heuristic"))
    assert first.endswith(", 30 epochs each, beside the same hosts left alone")


def test_a_round_has_one_line() -> None:
    (line,) = printed(completed(1, test_accuracy=85.7))
    assert line.split("  ") == [
        "round 1/10",
        "test accuracy: grown 85.7 %",
        "alone 83.5 %",
        "(+2.2 pp)",
        "1.5 kept per host",
        "1 rollback",
        "5,230 images/s, 41.5 epochs/s",
        "about 1m30s left",
    ]


@pytest.mark.parametrize(
    ("left", "eta"),
    [
        (59.4, "59s"),
        (59.9, "1m00s"),
        (9000.0, "2h30m"),
    ],
)
def test_the_time_left_is_in_whole_units(left: float, eta: str) -> None:
    (line,) = printed(completed(1, rounds=2, seconds=left), width=200)
    assert line.endswith(f"  about {eta} left")


def test_rollbacks_and_cut_seeds_have_lines() -> None:
    back = GovernorRollback(
        env=3,
        episode=11,
        epoch=17,
        reason="loss spike",
        value=math.nan,
        threshold=4.25,
        restored_epoch=12,
        rollbacks=1,
    )
    lines = printed(back, cut(5))
    assert lines == [
        "rollback: round 12, host 3, epoch 17: loss spike (not a number, limit 4.2500), back to epoch 12",
        "seed cut: round 1, host 1, epoch 5: conv_light in r0c1 became non-finite",
    ]


def test_words_are_not_broken_at_the_edge_of_a_terminal() -> None:
    stream = io.StringIO()
    console = Console(
        file=stream,
        width=30,
        force_terminal=True,
        color_system=None,
        _environ={"TERM": "xterm"},
    )
    ConsoleSink(console).handle(
        started(blueprints=("attention", "bottleneck", "conv_heavy"))
    )
    text = stream.getvalue()
    assert max(map(len, text.splitlines())) <= 30
    for name in ("attention", "bottleneck", "conv_heavy"):
        assert name in text


def test_brackets_are_printed_verbatim_and_lines_are_ascii() -> None:
    lines = printed(started(folder="runs/[red]x"), completed(1), cut(0))
    assert any("runs/[red]x" in line for line in lines)
    assert all(line.isascii() for line in lines)


def test_a_round_without_a_test_is_compared_with_the_baseline() -> None:
    (line,) = printed(completed(1, test_accuracy=None, alone_test_accuracy=None))
    assert line.split("  ")[1:4] == [
        "validation accuracy: grown 81.0 %",
        "baseline 78.5 %",
        "(+2.5 pp)",
    ]


def test_simulated_hosts_have_a_rate_in_epochs() -> None:
    (line,) = printed(completed(1, samples=0))
    assert "images" not in line
    assert "  41.5 epochs/s  " in line


def test_updates_comparisons_and_resumes_have_lines() -> None:
    lines = printed(
        RunResumed(3, 10, 8, 30, None, None, 0.0),
        updated(),
        ArmPlayed("heuristic", 1, 2, 83.25),
    )
    assert lines == [
        "resumed after round 3/10",
        "  learned: KL 0.012  clipped 8%  entropy 2.50  explained variance -0.50  12,800 env steps",
        "comparing, round 1/2: heuristic, test accuracy 83.2 %",
    ]


def test_the_header_names_the_cublas_workspaces() -> None:
    size = "up to 8.125 MiB per stream (CUBLAS_WORKSPACE_CONFIG=:4096:2:16:8, set by Esper)"
    assert f"cuBLAS workspaces: {size}" in printed(started(cublas_workspace=size))
    resumed = RunResumed(3, 10, 8, 30, None, None, 0.0, cublas_workspace=size)
    assert f"cuBLAS workspaces: {size}" in printed(resumed)
    assert not any("cuBLAS" in line for line in printed(started()))


@pytest.mark.finding("H2")
def test_the_header_names_the_tier_and_why_the_configured_one_is_not_used() -> None:
    assert "steps: graph, bfloat16" in printed(started())
    why = printed(
        started(tier="eager", tier_refused="it [has] bugs"), StepsNotCaptured("dropout")
    )
    assert "steps: eager, bfloat16; a faster tier cannot be used: it [has] bugs" in why
    assert why[-1] == "steps left to PyTorch: dropout"
    assert not any(line.startswith("steps") for line in printed(started(tier=None)))
    again = RunResumed(3, 10, 8, 30, tier="compiled", tier_refused=None, time=0.0)
    assert printed(again) == ["resumed after round 3/10", "steps: compiled"]
    within = RunResumed(
        3,
        10,
        8,
        30,
        None,
        None,
        0.0,
        ("a/checkpoint.pt is not a checkpoint",),
        epochs=5,
    )
    assert printed(within)[:2] == [
        "resumed after round 3/10, 5 epochs into the next round",
        "  warning: a/checkpoint.pt is not a checkpoint",
    ]


@pytest.mark.finding("L4")
def test_the_header_says_that_batches_are_split() -> None:
    assert not any("micro-batches" in line for line in printed(started()))
    assert any(
        "into 4 micro-batches; BatchNorm" in line
        for line in printed(started(micro_batches=4))
    )


def test_a_validation_says_which_agent_is_kept() -> None:
    better, worse = (
        printed(AgentValidated(5, 1.25, 5)),
        printed(AgentValidated(10, 1.0, 5)),
    )
    assert better == [
        "  agent of round 5: discounted return +1.250 on validation hosts, the best so far"
    ]
    assert worse == [
        "  agent of round 10: discounted return +1.000 on validation hosts, that of round 5 is kept"
    ]


def test_scores_with_a_price_are_in_pp_and_those_without_are_accuracies() -> None:
    priced = ScoreDefined("return", "pp", 1.0, priced=True, of_reward=10.0)
    learning = completed(1, test_accuracy=None, alone_test_accuracy=None)
    validation = AgentValidated(5, 1.25, 5, {"none": 1.0})
    first, second, third = printed(priced, learning, completed(2), validation)
    assert "validation accuracy: grown 81.0 %" in first
    assert "test return: grown 81.0 pp" in second
    assert "discounted return +12.50 pp on validation hosts" in third
    assert "none +10.00 pp" in third


def test_the_header_of_hosts_that_differ_names_no_size_of_one_of_them() -> None:
    text = "\n".join(printed(started(task="varied")))
    assert "at most 30 epochs each" in text
    assert "hosts differ in size, slots r0c0, r0c1" in text
    assert "6,418" not in text
    assert "simulated" not in text


def test_an_anomaly_is_a_warning_with_advice() -> None:
    warning = AnomalyDetected(
        4,
        "value_wrong",
        None,
        -3.0,
        -1.0,
        "the critic is off",
        "lower ppo.learning_rate",
    )
    assert printed(warning) == [
        "  warning, round 4: the critic is off; try: lower ppo.learning_rate"
    ]


def test_simulated_hosts_are_said_to_be_simulated() -> None:
    lines = printed(replace(started(), tier=None))
    assert any(line.startswith("simulated: no network is trained") for line in lines)


def test_the_time_of_all_rounds_is_told_once_as_soon_as_it_is_known() -> None:
    stream = io.StringIO()
    seconds = iter(range(1000))
    sink = ConsoleSink(Console(file=stream, width=200), lambda: float(next(seconds)))
    sink.handle(replace(started(), rounds=2, n_envs=1, episode_length=10))
    for number in range(1, 5):
        sink.handle(epoch(0, number))
    said = [
        line
        for line in stream.getvalue().splitlines()
        if line.startswith("all rounds: about ")
    ]
    assert len(said) == 1


def test_a_run_with_one_host_has_a_line_for_every_tenth_of_its_epochs() -> None:
    begun = replace(started(), rounds=1, n_envs=1, episode_length=20)
    lines = printed(begun, *(epoch(0, number) for number in range(1, 21)), width=200)
    told = [line for line in lines if line.startswith("epoch ")]
    assert [line.split()[1] for line in told] == [f"{n}/20" for n in range(2, 21, 2)]
