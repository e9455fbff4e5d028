"""`--processes N` and torchrun: the same run in several processes, also when one of them is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from esper.cli import launch
from esper.cli.compare import is_comparison_of
from esper.cli.launch import (
    LAUNCHED,
    RankOptions,
    codes_of_first,
    fitting,
    how_ranks_ended,
    refuse_pipes,
    waiting_reported,
)
from esper.cli.run import is_run_of
from esper.compare.arms import read_arms
from esper.compare.comparison_run import ComparisonRun
from esper.config import ConfigError, TrainingConfig
from esper.files import checkpoint
from esper.training.execution.ranks import RunRanks
from esper.training.executor import RankLost
from tests.cli.child import start
from tests.cli.conftest import Esper
from tests.run.run_helpers import play, tiny

TINY = ("run", "--config", "run.toml", "--out", "r")
LONG = 400
"""Rounds of a run that a test stops."""


def config_file(folder: Path, rounds: int) -> None:
    (folder / "run.toml").write_text(tiny(rounds=rounds, seed=7).to_toml())


def ranks_below(launcher: int) -> dict[int, int]:
    """Process ids of the launcher's ranks, by rank."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    found = {}
    for child in map(int, children):
        environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        rank = [value for value in environment if value.startswith(b"RANK=")]
        if rank:
            found[int(rank[0][5:])] = child
    return found


def wait_for_round(folder: Path, number: int, child: subprocess.Popen[str]) -> None:
    log = folder / "r" / "metrics.csv"
    while child.poll() is None and (
        not log.exists() or len(log.read_text().splitlines()) <= number
    ):
        time.sleep(0.05)
    assert child.poll() is None, child.communicate()


def gone(ids: list[int]) -> bool:
    """Whether these processes have ended, within some seconds."""
    for _ in range(200):
        if not any(Path(f"/proc/{one}").exists() for one in ids):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ("--processes", "0"),
            "--processes is '0': give a number of processes, 1 to 9999, or auto",
        ),
        (("--processes", "two"), "--processes is 'two'"),
        (
            ("--max-restarts", "1"),
            "--max-restarts is for --processes; torchrun has an option of this name itself",
        ),
        (("--rank-timeout", "0"), "0.0 is not in the range 0<x<=1000000.0"),
        (("--processes", "2", "--set", "env.n_envs=none"), "env.n_envs"),
        (("--processes", "auto", "--device", "gpu"), "device 'gpu'"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_started(
    options: tuple[str, ...], words: str, esper: Esper, tmp_path: Path
) -> None:
    done = esper("run", *options)
    assert done.code == 2
    assert words in done.err
    assert list(tmp_path.iterdir()) == []


def test_processes_within_torchrun_are_refused(
    esper: Esper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    done = esper("run", "--processes", "2")
    assert (done.code, "torchrun has started some already" in done.err) == (2, True)


@pytest.mark.parametrize(
    ("rank", "size"), [("1", None), ("first", None), ("0", "2"), ("0", "two")]
)
def test_a_rank_that_torchrun_has_not_set_up_is_refused(
    rank: str, size: str | None, esper: Esper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("MASTER_PORT", "29500")
    if size is not None:
        monkeypatch.setenv("WORLD_SIZE", size)
    done = esper("run")
    assert (done.code, f"RANK={rank} but not all that torchrun sets" in done.err) == (
        2,
        True,
    )


LEFT = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


@pytest.mark.parametrize(
    "wrong",
    [
        {"RANK": "2"},
        {"MASTER_PORT": "70000"},
        {"LOCAL_RANK": "first"},
        {"LOCAL_WORLD_SIZE": "0"},
        {"LOCAL_WORLD_SIZE": ""},
        {"GROUP_WORLD_SIZE": "-1"},
        {"TORCHELASTIC_RESTART_COUNT": "x"},
        {"TORCHELASTIC_MAX_RESTARTS": "1.5"},
    ],
)
def test_launch_variables_that_no_launcher_sets_are_refused(
    wrong: dict[str, str], esper: Esper, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**LEFT, **wrong}.items():
        monkeypatch.setenv(name, value)
    done = esper("compare", "--arm", "none")
    ((name, value),) = wrong.items()
    assert (done.code, f"{name}={value}; expected a whole" in done.err) == (2, True)
    assert "unset RANK" in done.err


@pytest.mark.parametrize("launcher", [None, "TORCHELASTIC_RUN_ID"])
def test_a_command_that_waits_for_other_ranks_says_so(
    launcher: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in LEFT.items():
        monkeypatch.setenv(name, value)
    if launcher is not None:
        monkeypatch.setenv(launcher, "x")
    monkeypatch.setattr(launch, "WAITING_SECONDS", 0)
    said = threading.Event()
    echo = click.echo

    def heard(*words: str, **options: bool) -> None:
        echo(*words, **options)
        said.set()

    monkeypatch.setattr(click, "echo", heard)
    with waiting_reported():
        assert said.wait(60)
    err = capsys.readouterr().err
    assert "RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500" in err
    assert ("unset RANK and WORLD_SIZE" in err) == (launcher is None)


@pytest.mark.parametrize("variables", [{}, {**LEFT, LAUNCHED: "here"}])
def test_nothing_is_said_without_ranks_or_if_esper_has_started_them(
    variables: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launch, "WAITING_SECONDS", 0)
    before = threading.active_count()
    with waiting_reported():
        assert threading.active_count() == before
    assert capsys.readouterr().err == ""


def test_a_count_of_restarts_that_is_left_in_a_shell_resumes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert not RankOptions.of(None, None, 30.0).restarted
    for name, value in LEFT.items():
        monkeypatch.setenv(name, value)
    assert RankOptions.of(None, None, 30.0).restarted


@pytest.mark.parametrize(
    "form", ["{}", "--config={}", "schedule:{}", "mine={}", "ppo:{}"]
)
def test_processes_refuse_pipes_wherever_they_are_named(
    form: str, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    refuse_pipes(["esper", form.format(tmp_path / "file")])
    with pytest.raises(ConfigError, match="pipe is a pipe, which only one process"):
        refuse_pipes(["esper", form.format(tmp_path / "pipe")])


def test_a_rank_that_is_alone_but_not_the_first_is_refused(
    esper: Esper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "1")
    done = esper("run")
    assert (done.code, "RANK=1 but WORLD_SIZE=1: unset both" in done.err) == (2, True)


@pytest.mark.parametrize(
    "command", [("run",), ("compare", "--arm", "none", "--arm", "random")]
)
def test_a_folder_in_use_is_refused_before_a_restart_could_take_it_for_its_own(
    command: tuple[str, ...], esper: Esper, tmp_path: Path
) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "other").touch()
    done = esper(*command, "--processes", "2", "--max-restarts", "1", "--out", "r")
    assert (done.code, done.err) == (
        2,
        "Error: r is not empty; give a new or empty folder\n",
    )


def test_only_a_run_with_the_values_that_were_given_is_continued(
    tmp_path: Path,
) -> None:
    config = tiny(task="planted", seed=7)
    assert not is_run_of(tmp_path / "r", config)
    play(config, tmp_path / "r")
    assert is_run_of(tmp_path / "r", config)
    assert not is_run_of(tmp_path / "r", tiny(task="planted", seed=8))


def test_only_a_comparison_of_the_same_arms_is_continued(tmp_path: Path) -> None:
    base = {"task": {"name": "planted"}, "env": {"n_envs": 2, "episode_length": 4}}
    arms = read_arms(("none", "random"), base)
    assert not is_comparison_of(tmp_path / "o", arms)
    ComparisonRun(arms, 2, tmp_path / "o").run()
    assert is_comparison_of(tmp_path / "o", arms)
    assert not is_comparison_of(tmp_path / "o", read_arms(("none", "heuristic"), base))
    assert not is_comparison_of(
        tmp_path / "o", read_arms(("none", "random"), {**base, "run": {"seed": 3}})
    )


@pytest.mark.parametrize(
    ("codes", "words"),
    [
        ({0: 2, 1: 2}, ""),
        ({0: 1, 1: -15}, ""),
        (
            {0: -15, 1: -15},
            "rank 0 was killed (SIGTERM) and rank 1 was killed (SIGTERM)",
        ),
        ({0: 1, 1: -11}, "rank 1 was killed (SIGSEGV)"),
        ({0: 1, 1: 3}, "rank 1 ended with exit code 3"),
    ],
)
def test_a_rank_that_has_not_said_why_it_ended_is_named(
    codes: dict[int, int], words: str
) -> None:
    assert how_ranks_ended(codes) == words


def test_a_rank_that_the_launcher_killed_later_is_not_named() -> None:
    failures = {rank: ProcessFailure(rank, 0, -signal.SIGKILL, "") for rank in range(3)}
    for failure, seconds in zip(failures.values(), (130, 100, 101), strict=True):
        failure.timestamp = seconds
    assert codes_of_first(failures) == {1: -signal.SIGKILL, 2: -signal.SIGKILL}


@pytest.mark.parametrize("lost", [False, True])
def test_rank_0_is_interrupted_only_if_no_other_rank_is_lost(
    lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher ends rank 0 by a signal once another rank is gone, and reports that one."""
    ranks = RunRanks(0, 2)

    @contextmanager
    def joined(_minutes: float) -> Iterator[RunRanks]:
        try:
            yield ranks
        finally:  # as when the others are dismissed
            ranks.lost = RankLost(1, "is gone", hangs=False) if lost else None

    monkeypatch.setattr(RunRanks, "joined", joined)
    monkeypatch.setenv(LAUNCHED, "folder")
    with (
        pytest.raises(click.exceptions.Exit if lost else click.Abort),
        RankOptions(None, 0, 1.0).joined(),
    ):
        raise click.Abort


def test_simulated_hosts_have_one_process() -> None:
    assert fitting(TrainingConfig.parse({"task": {"name": "planted"}})) == 1


def test_hosts_that_are_drawn_have_no_more_processes_than_there_are_hosts() -> None:
    drawn = {"task": {"name": "varied"}, "env": {"n_envs": 1}}
    assert fitting(TrainingConfig.parse(drawn)) == 1


def test_a_restart_by_torchrun_that_would_hang_is_refused(
    esper: Esper, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"USE_AGENT_STORE": "True", "MAX_RESTARTS": "1"}.items():
        monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
    monkeypatch.setenv("RANK", "0")
    done = esper("run", "--out", "r")
    assert (done.code, "needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in done.err) == (
        2,
        True,
    )


@pytest.mark.slow
def test_a_wrong_option_is_reported_once_in_spite_of_restarts(tmp_path: Path) -> None:
    config_file(tmp_path, 1)
    (tmp_path / "esper").mkdir()
    (tmp_path / "esper" / "__init__.py").write_text(
        "raise SystemExit('another checkout')\n"
    )
    child = start(*TINY, "--processes", "3", "--max-restarts", "2", folder=tmp_path)
    _, err = child.communicate(timeout=300)
    assert child.returncode == 2
    assert err == "Error: a round has 2 hosts (env.n_envs) for 3 ranks: use at most 2\n"
    assert not (tmp_path / "r").exists()


@pytest.mark.slow
def test_a_killed_rank_ends_the_run_with_one_message(tmp_path: Path) -> None:
    rank = 1
    config_file(tmp_path, LONG)
    child = start(*TINY, "--processes", "2", folder=tmp_path)
    wait_for_round(tmp_path, 2, child)  # so the first one is saved
    ranks = ranks_below(child.pid)
    os.kill(ranks[rank], signal.SIGKILL)
    _, err = child.communicate(timeout=120)
    assert child.returncode == 1
    assert err == (
        f"Error: rank {rank} was killed (SIGKILL, perhaps by the system because memory ran out)\n"
        "Progress was saved. To continue: esper run --resume r\n"
    )
    assert gone(list(ranks.values()))
    assert checkpoint.read(tmp_path / "r")["round"] >= 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_all_ranks_at_the_end_of_the_step(
    number: signal.Signals, tmp_path: Path
) -> None:
    config_file(tmp_path, LONG)
    child = start(*TINY, "--processes", "2", folder=tmp_path)
    wait_for_round(tmp_path, 1, child)
    ranks = ranks_below(child.pid)
    child.send_signal(number)
    out, err = child.communicate(timeout=120)
    assert child.returncode == 130
    lines = err.strip().splitlines()
    if number == signal.SIGINT and len(lines) == 2:  # else it came between two steps
        assert (
            lines.pop(0)
            == "stopping at the end of this step; a second Ctrl-C stops at once"
        )
    assert lines == ["Interrupted."]
    assert "esper run --resume r" in out
    assert gone(list(ranks.values()))
