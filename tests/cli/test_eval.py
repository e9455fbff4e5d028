"""`esper eval`: its options and output, and every input that is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from esper.data.shared_batches import SharedBatchError
from esper.files import checkpoint
from esper.files.policy import find_policy
from tests.cli.conftest import SIMULATED, Esper

pytestmark = pytest.mark.usefixtures("no_plots")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on simulated hosts."""
    from tests.run.run_helpers import learning, play

    config = learning("planted", rounds=2)
    return play(config, tmp_path_factory.mktemp("runs") / "mine")[0].folder


def test_an_evaluation_prints_greedy_and_sampled_play_beside_hosts_left_alone(
    esper: Esper, run: Path
) -> None:
    found = esper("eval", str(run), "--pairs", "3", "--json", "o.json", "--out", "out")
    assert (found.code, found.err) == (0, "")
    lines = found.out.splitlines()
    assert (
        sum(line.startswith("comparing, round ") for line in lines) == 3 * 2
    )  # arms, rounds of at most 2 hosts
    assert "Committed hosts of planted after their last epoch: 3 pairs, seed 7" in lines
    assert Path("o.json").read_text() == Path("out/results.json").read_text()
    told = json.loads(Path("o.json").read_text())
    assert list(told["arms"]) == ["none", "greedy", "stochastic"]
    for compared in told["metrics"][0]["comparisons"]:
        assert any(
            line.startswith(f"{compared['name_a']} against none: ") for line in lines
        )
        assert any(f"{compared['difference']:+.2f}" in line for line in lines)
    assert "greedy, stochastic: trained once" in found.out
    assert lines[-1] == f"{run} learned on planted, 2 of 2 rounds, seed 7."


def test_a_saved_agent_has_its_score_and_plays_by_the_proposed_command(
    esper: Esper, run: Path
) -> None:
    found = esper(
        "eval",
        str(run),
        "--pairs",
        "2",
        "--save",
        "mine.safetensors",
        "--json",
        "o.json",
    )
    assert (found.code, found.err) == (0, "")
    *_, last = found.out.splitlines()
    assert (
        last
        == "Saved. To use it: esper run --task planted --controller checkpoint:mine.safetensors"
    )
    saved = find_policy("mine.safetensors")
    told = json.loads(Path("o.json").read_text())
    assert saved.facts is not None
    assert saved.facts.score is not None
    assert saved.facts.score["metrics"] == told["metrics"]
    again = esper("eval", "mine.safetensors", "--pairs", "2", "--json", "again.json")
    assert again.code == 0, again.err
    assert json.loads(Path("again.json").read_text())["metrics"] == told["metrics"]
    sizes = ("--envs", "2", "--episode-length", "4", "--rounds", "1")
    played = esper(*last.partition(": esper ")[2].split(), *sizes, "--out", "played")
    assert played.code == 0, played.err
    assert checkpoint.read(Path("played"))["policy"] is not None
    assert "This agent learned on" not in played.out
    more = (*sizes, "--set", "env.edits_per_epoch=2", "--out", "more")
    played = esper(*last.partition(": esper ")[2].split(), *more)
    assert (
        "This agent learned on planted, 2 of 2 rounds, seed 7, with env.edits_per_epoch=1, which is 2 here."
        in played.out.splitlines()
    )


def test_results_are_printed_even_if_they_cannot_be_written(
    esper: Esper, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("esper.compare.table.write_atomic", full)
    found = esper("eval", str(run), "--pairs", "1")
    assert (found.code, found.err) == (1, "Error: [Errno 28] No space left on device\n")
    assert "Committed hosts of planted" in found.out


@pytest.mark.finding("M12")
def test_expected_errors_are_shown_without_a_traceback(
    esper: Esper, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_arguments: object, **_names: object) -> None:
        raise SharedBatchError("a worker died")

    monkeypatch.setattr("esper.compare.runner.play_round", breaks)
    found = esper("eval", str(run))
    assert (found.code, found.err) == (1, "Error: a worker died\n")


REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "task": (("--task", "nope"), "unknown task 'nope'"),
    "pairs": (("--pairs", "0"), "run.evaluation_pairs"),
    "width of simulated hosts": (("--width", "4"), "have no width to be set"),
    "value": (("--set", "env.nope=1"), "unknown key env.nope"),
    "value without effect": (("--set", "ppo.width=8"), "ppo.width has no effect here"),
    "json in a folder that is not there": (
        ("--json", "no/o.json"),
        "--json no/o.json: give a new file",
    ),
    "json that is there": (
        ("--json", "there.json"),
        "--json there.json: give a new file",
    ),
    "save under another ending": (
        ("--save", "a.pt"),
        "a.pt: give a new file, NAME.safetensors",
    ),
    "save over a file": (
        ("--save", "there.safetensors"),
        "there.safetensors: give a new file",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_input_is_refused_before_anything_is_played(
    esper: Esper, run: Path, case: str
) -> None:
    for name in ("there.json", "there.safetensors"):
        Path(name).write_text("dear diary")
    arguments, message = REFUSED[case]
    found = esper("eval", str(run), *arguments)
    assert found.code == 2, found
    assert message in found.err
    assert "Traceback" not in found.err
    assert found.out == ""
    assert sorted(path.name for path in Path().iterdir()) == [
        "there.json",
        "there.safetensors",
    ]
    assert Path("there.json").read_text() == "dear diary"


def test_a_controller_that_did_not_learn_is_refused(esper: Esper) -> None:
    Path("diary.pt").write_text("dear diary")
    Path("diary.safetensors").write_text("dear diary")
    for name, message in {
        "gone": "no checkpoint at gone; give the folder of a ppo run, its checkpoint.pt",
        "gone.safetensors": "no checkpoint at gone.safetensors",
        "diary.pt": "diary.pt is not a checkpoint",
        "diary.safetensors": "diary.safetensors is not a policy",
    }.items():
        found = esper("eval", name)
        assert found.code == 2
        assert message in found.err
        assert found.out == ""
    assert esper("eval").code == 2


def test_a_run_that_learned_nothing_names_those_that_did(esper: Esper) -> None:
    assert (
        esper(
            "run",
            *SIMULATED,
            "--controller",
            "random",
            "--rounds",
            "1",
            "--out",
            "mine",
        ).code
        == 0
    )
    found = esper("eval", "mine")
    assert found.code == 2
    assert "its controller random does not learn" in found.err
    assert "pretrained" in found.err


def test_ctrl_c_ends_it(
    esper: Esper, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_arguments: Any, **_more: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("esper.compare.runner.play_round", interrupted)
    found = esper("eval", str(run))
    assert (found.code, found.err.strip()) == (130, "Interrupted.")
    assert "To continue: esper compare --resume runs/eval-planted-" in found.out
