"""Run folders that are complete, in progress, interrupted, damaged, incomplete, or not run folders."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from esper.config import ConfigError, TrainingConfig
from esper.show.live import short_form
from esper.show.page import report_html
from esper.show.read import is_comparison, open_run, open_runs, saved_tables
from esper.telemetry.event import EpochCompleted
from esper.telemetry.sinks.jsonl import JsonlSink
from tests.run.run_helpers import play
from tests.show.page_helpers import Going, in_the_second_round

pytestmark = pytest.mark.usefixtures("no_drawings")


def test_a_finished_run_is_read_whole(learned: Path) -> None:
    run = open_run(learned)
    assert run.all_problems() == []
    assert run.state() == "finished"
    assert run.state_words() == "finished: 3 rounds played and compared"
    assert (run.view.done, run.view.rounds) == (3, 3)
    assert len(run.of(EpochCompleted)) == 3 * 2 * 4
    assert run.environment["packages"]["esper"]


def test_a_run_that_is_going_is_read_and_refreshed(
    going: Callable[..., Going],
) -> None:
    begun = going(in_the_second_round)
    run = open_run(begun.folder)
    assert run.state_words() == "running: 1 of 3 rounds completed"
    assert run.all_problems() == []
    assert "epoch 2" in short_form(run)
    begun.end()
    assert run.refresh()
    assert (run.state(), run.view.done) == ("finished", 3)
    assert len(run.of(EpochCompleted)) == 3 * 2 * 4


def test_an_interrupted_run_is_not_taken_for_a_going_one(
    going: Callable[..., Going],
) -> None:
    begun = going(in_the_second_round)
    begun.sink.close()
    run = open_run(begun.folder)
    assert run.state_words() == "interrupted: 1 of 3 rounds completed"


def test_simulated_hosts_lack_nothing(tmp_path: Path) -> None:
    config = TrainingConfig.parse(
        {
            "run": {"rounds": 1, "controller": "heuristic", "evaluation_pairs": 1},
            "task": {"name": "planted"},
            "env": {"n_envs": 4},
        }
    )
    play(config, tmp_path / "run")
    run = open_run(tmp_path / "run")
    assert run.all_problems() == []
    assert "by round" in report_html([run])
    assert "finished: 1 round" in short_form(run)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.toml", b"\xff<broken"),
        ("env.json", None),
        ("env.json", b"[" * 100_000),
        ("config.toml", b'"text"'),
    ],
)
def test_a_file_that_is_missing_or_broken_is_said_where_it_is_needed(
    name: str, content: bytes | None, grown: Path, copy: Callable[..., Path]
) -> None:
    folder = copy(grown)
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    run = open_run(folder)
    said = [words for words in run.all_problems() if name in words]
    assert len(said) == 1
    assert "Configuration" in report_html([run])


def test_a_folder_that_is_no_run_is_refused_with_the_runs_nearby(
    grown: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        ConfigError,
        match=r"is not a run folder: it has no events\.jsonl; give .* such as .*grown",
    ):
        open_run(grown.parent)
    with pytest.raises(ConfigError, match="does not exist; give the folder of a run"):
        open_run(tmp_path / "nowhere")
    (tmp_path / "config.toml").write_text("")
    (tmp_path / "metrics.csv").write_text("")
    with pytest.raises(ConfigError, match=r"it has no events\.jsonl"):
        open_run(tmp_path)
    with pytest.raises(
        ConfigError,
        match=f"is a file; give the folder of the run, perhaps {re.escape(str(grown))}",
    ):
        open_run(grown / "events.jsonl")


def test_a_folder_with_nothing_but_a_log_is_a_run(tmp_path: Path) -> None:
    JsonlSink(tmp_path / "events.jsonl").close()
    run = open_run(tmp_path)
    assert run.state_words() == "interrupted: 0 of 0 rounds completed"
    assert "Nothing was compared yet" in report_html([run])
    assert "task not known, controller not known" in short_form(run)


def test_runs_have_names_that_differ(
    grown: Path, copy: Callable[..., Path], tmp_path: Path
) -> None:
    one, other = copy(grown, name="a/run"), copy(grown, name="b/run")
    assert [run.name for run in open_runs([one, other])] == ["a/run", "b/run"]
    assert [run.name for run in open_runs([one, grown])] == ["run", "grown"]
    with pytest.raises(ConfigError, match="is given twice"):
        open_runs([one, tmp_path / "a" / ".." / "a" / "run"])


def test_a_folder_with_the_settings_of_a_comparison_is_one(tmp_path: Path) -> None:
    assert not is_comparison(tmp_path)
    (tmp_path / "comparison.json").write_text("{}")
    assert is_comparison(tmp_path)


def test_the_tables_of_a_comparison_are_those_that_it_printed(tmp_path: Path) -> None:
    (tmp_path / "table.txt").write_text("ppo – 95.2 %\n", encoding="utf-8")
    assert saved_tables(tmp_path) == "ppo – 95.2 %\n"


def test_without_a_result_the_error_says_how_to_continue(tmp_path: Path) -> None:
    folder = tmp_path / "my comparison"
    folder.mkdir()
    with pytest.raises(
        ConfigError, match=rf"without a result yet.*esper compare --resume '{folder}'"
    ):
        saved_tables(folder)
