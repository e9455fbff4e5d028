"""The closing words of a run: its verdicts, and commands that can be typed."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest

from esper.cli.group import group
from esper.cli.run import closing_words, next_commands, plain_words, result_lines
from esper.compare.analysis import corrected
from esper.compare.statistics import compare_pairs
from esper.run.telemetry import RunSummary

ARMS = ("none", "untrained")
BASE = [80.0 + i for i in range(10)]


def ended(
    *differences: list[float], controller: str = "ppo", **changes: Any
) -> RunSummary:
    """A run compared with baselines b0, b1, ...: each list is what its controller did better on the same hosts."""
    found = []
    for i, row in enumerate(differences):
        base = BASE[: len(row)]
        ours = [b + d for b, d in zip(base, row, strict=True)]
        found.append(compare_pairs(ours, base, name_a=controller, name_b=f"b{i}"))
    summary = RunSummary(
        folder=Path("runs/a"),
        controller=controller,
        comparisons=tuple(corrected(found)),
        host_parameters=277,
        grown_parameters=700.4,
        fossils=1.25,
        rounds=3,
        total_rounds=5,
        interrupted=False,
        seconds=61.4,
        dropped_sinks={},
    )
    return replace(summary, **changes)


def test_each_baseline_has_a_line_with_its_verdict() -> None:
    spread = [1.0 + 0.1 * i for i in range(10)]
    summary = ended(spread, [-d for d in spread], [0.5, -0.5] * 5)
    lines = result_lines(summary)
    assert lines[0].startswith("Test accuracy of 10 hosts grown by ppo: 85.95 %.")
    words = [line.rpartition(": ")[2] for line in lines[3:6]]
    assert words == ["better", "worse", "no evidence of a difference"]
    assert [line.split()[0] for line in lines[3:6]] == ["b0", "b1", "b2"]
    assert "+1.45 pp, +1." in lines[3]
    assert "-1.45 pp, -1." in lines[4]


def alone(*difference: float) -> RunSummary:
    ours = [b + d for b, d in zip(BASE, difference, strict=False)]
    pair = compare_pairs(ours, BASE[: len(difference)], name_a="ppo", name_b="none")
    return replace(ended(), comparisons=tuple(corrected([pair])))


def test_the_result_is_one_line_of_plain_words() -> None:
    spread = [1.0 + 0.1 * i for i in range(9)]
    better = "In short, growing paid off: +1.21 pp over the same hosts alone, 9 of 10 better."
    assert plain_words(alone(*spread, -0.5), "digits") == [
        better,
        "Parameters: 277 alone, 700 grown (1.2 seeds kept per host).",
        "Not compared: hosts of that size from the start, or trained for longer.",
    ]
    assert plain_words(alone(*(-d for d in spread), -1.0), "digits")[0].startswith(
        "In short, growing did harm: -1.36 pp"
    )
    assert (
        "whether growing pays off is open: +0.00 pp on 10 hosts."
        in plain_words(alone(*[0.5, -0.5] * 5), "digits")[0]
    )
    assert (
        "too few hosts to tell whether growing paid off (+3.00 pp)"
        in plain_words(alone(3.0), "digits")[0]
    )
    assert plain_words(ended([1.0] * 10), "digits") == []  # no hosts were left alone


def test_copies_of_one_host_are_said_to_be_no_sample() -> None:
    ours = np.random.default_rng(0).normal(70, 1, 10)
    pair = compare_pairs(
        ours, [64.63] * 10, name_a="mine", name_b="none", copies="none"
    )
    summary = replace(ended(), comparisons=tuple(corrected([pair])))
    gap = f"{pair.difference:+.2f} pp"
    copies = "all 10 hosts of none are copies of one host, which are no sample"
    (first, *_) = plain_words(summary, "planted")
    assert first == f"In short, {gap}, without a verdict: {copies}."
    assert result_lines(summary)[3].endswith(
        f"{gap}, no interval: no verdict, {copies}"
    )


@pytest.mark.parametrize(
    ("gains", "words"),
    [
        ([1.0 + 0.1 * i for i in range(10)], "Learning made the agent better: +1.45"),
        ([-1.0 - 0.1 * i for i in range(10)], "Learning made the agent worse: -1.45"),
        ([0.5, -0.5] * 5, "Whether learning helped is open: +0.00"),
    ],
)
def test_an_agent_is_judged_beside_itself_untrained(
    gains: list[float], words: str
) -> None:
    ours = [b + d for b, d in zip(BASE, gains, strict=True)]
    pairs = [compare_pairs(ours, BASE, name_a="ppo", name_b=name) for name in ARMS]
    summary = replace(ended(), comparisons=tuple(corrected(pairs)))
    line = plain_words(summary, "varied")[1]
    assert line.startswith(words)
    assert line.endswith("against the agent untrained.")
    assert len(line) <= 80


def test_the_result_fits_80_columns() -> None:
    words = closing_words(
        replace(alone(*[0.5, -0.5] * 5), grown_parameters=1e6), "digits"
    ).splitlines()
    assert max(map(len, words[: words.index("Next:")])) <= 80


@pytest.mark.parametrize(
    "controller",
    ["checkpoint:runs/a", "heuristic", "mine.py:make"],
)
def test_intervals_of_an_agent_are_said_to_leave_out_the_spread_of_training(
    controller: str,
) -> None:
    said = f"{controller}: trained once, so the intervals leave out the spread of training."
    lines = result_lines(ended([1.0, 2.0], controller=controller))
    assert (lines[-1] == said) == (controller not in ("heuristic", "mine.py:make"))


@pytest.mark.finding("M14")
def test_few_pairs_are_called_inconclusive_however_large_the_difference() -> None:
    assert result_lines(ended([30.0 + i for i in range(9)]))[3].endswith(
        ": inconclusive, under 10 pairs"
    )
    (line,) = result_lines(ended([30.0]))[3:4]
    assert line.endswith("+30.00 pp, no interval: inconclusive, under 10 pairs")


@pytest.mark.finding("M14")
def test_the_word_follows_the_corrected_p_value() -> None:
    """The difference is significant alone, p = 0.016, but not among five comparisons."""
    weak = [3.0, 2.0] * 4 + [-1.0, -1.0]
    assert result_lines(ended(weak))[3].endswith(": better")
    for line in result_lines(ended(*[weak] * 5))[3:8]:
        said = "no evidence of a difference among all comparisons, p = 0."
        assert said in line, "the interval, which lies above 0, is that of one"


def test_an_interrupted_agent_claims_nothing_and_prints_the_resume_command() -> None:
    words = closing_words(ended(interrupted=True), "digits").splitlines()
    assert words[1] == "Nothing was compared: the agent is still learning."
    assert words[2] == "3 rounds in 61 s; run folder: runs/a"
    assert words[words.index("Next:") + 1] == "  esper run --resume runs/a"
    assert not any("checkpoint:" in line for line in words)
    with pytest.raises(ValueError, match="nothing was compared"):
        _ = ended(interrupted=True).comparison


def test_a_comparison_that_was_interrupted_is_said_to_be_missing() -> None:
    words = closing_words(
        ended(interrupted=True, total_rounds=3), "digits"
    ).splitlines()
    assert (
        words[1]
        == "All rounds are done, but the comparison is not: resume the run to complete it."
    )


def test_a_finished_run_prints_no_resume_command() -> None:
    words = closing_words(ended([1.0] * 10), "digits")
    assert "--resume" not in words
    assert "nterrupted" not in words


def test_lost_telemetry_is_named() -> None:
    words = closing_words(
        ended([1.0] * 10, dropped_sinks={"JsonlSink": "No space left"}), "digits"
    )
    assert "Telemetry lost: JsonlSink failed (No space left)." in words.splitlines()


@pytest.mark.parametrize("interrupted", [False, True])
@pytest.mark.parametrize("task", ["digits", "mine"])
@pytest.mark.parametrize(
    "controller",
    ["ppo", "checkpoint:runs/b", "schedule:s.toml", "none"],
)
def test_the_commands_it_proposes_are_commands(
    controller: str, task: str, interrupted: bool
) -> None:
    lines = next_commands(
        ended([1.0] * 10, controller=controller, interrupted=interrupted), task
    )
    assert len(lines) == 2
    parent = click.Context(group, info_name="esper", **group.context_settings)
    for name, *arguments in (line.split()[1:] for line in lines):
        command = group.get_command(parent, name)
        assert command is not None
        command.make_context(
            name, list(arguments), parent
        )  # raises for an option that is not there
    assert lines[0] == "  esper report runs/a"
    assert ("checkpoint:runs/a" in lines[1]) == (
        controller == "ppo" and not interrupted
    )
    # No schedule was compared, because none fits.
    assert not any(word == "schedule" for line in lines for word in line.split())


def test_the_shipped_schedule_is_proposed_if_it_fitted_the_run() -> None:
    pair = compare_pairs(BASE, BASE, name_a="none", name_b="schedule")
    summary = replace(ended(), controller="none", comparisons=tuple(corrected([pair])))
    assert "--arm schedule" in next_commands(summary, "digits")[1]
    summary = ended([1.0] * 10, controller="schedule")
    assert "--arm schedule" in next_commands(summary, "digits")[1]


def test_proposed_commands_are_quoted_for_a_shell() -> None:
    folder, task = "my runs/a;b", "my tasks/t.py:make"
    summary = ended([1.0] * 10, folder=Path(folder), interrupted=True)
    lines = closing_words(summary, task).splitlines()
    resume, report, compare = (
        shlex.split(line) for line in lines[lines.index("Next:") + 1 :]
    )
    assert resume == ["esper", "run", "--resume", folder, "--task", task]
    assert report == ["esper", "report", folder]
    assert compare[:6] == [
        "esper",
        "compare",
        "--config",
        f"{folder}/config.toml",
        "--task",
        task,
    ]
    assert "bigger" not in compare, "only a HostFamily can be wider"


def test_the_last_lines_are_the_answer_and_what_compares_the_rest() -> None:
    lines = closing_words(alone(*[1.0] * 10), "digits").splitlines()
    answer = next(n for n, line in enumerate(lines) if line.startswith("In short"))
    assert lines[answer + 3] == "Next:"
    assert "--arm bigger --arm same-compute --arm none" in lines[-1]
    assert len(plain_words(alone(*[1.0] * 10), "planted")) == 2


@pytest.mark.parametrize("task", ["planted", "digits", "mine.py:make"])
@pytest.mark.parametrize("controller", ["ppo", "heuristic", "random", "none"])
def test_the_arms_that_it_proposes_are_different_ones(
    controller: str, task: str
) -> None:
    words = shlex.split(
        next_commands(ended([1.0] * 10, controller=controller), task)[1]
    )
    arms = [words[n + 1] for n, word in enumerate(words) if word == "--arm"]
    sizes = {"digits": (4,), "planted": (3, 4)}.get(task, (3,))
    assert len(set(arms)) == len(arms)
    assert len(arms) in sizes
    assert ("bigger" in arms) == (task == "digits")


def test_a_controller_whose_path_has_a_space_is_not_proposed_again() -> None:
    summary = ended([1.0] * 10, controller="schedule:my file.toml")
    lines = next_commands(summary, "digits")
    assert "schedule:my file.toml" in shlex.split(lines[1])
