"""Every wrong input gives one clear message and exit code 2, and leaves nothing behind."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import pytest

from esper.cli.group import COMMANDS, group
from esper.compare.comparison_run import ComparisonRun
from esper.run.experiment import Experiment
from tests.cli.conftest import SIMULATED
from tests.cli.input_helpers import Esper, refused

TINY = ("--envs", "2", "--episode-length", "3", "--rounds", "1")
SMALL = ("--set", "task.samples_per_epoch=128", "--set", "env.baseline_episodes=1")
QUICK = (*SIMULATED, "--rounds", "1", "--controller", "none", "--out", "mine")
GERMINATE = (
    '[[action]]\nepoch = 0\nop = "GERMINATE"\nslot = "r0c0"\nblueprint = "norm"\n'
)


RUN: dict[str, tuple[Any, ...]] = {
    "task": (("--task", "nope"), "unknown task 'nope'", "digits"),
    "controller": (
        ("--controller", "nope"),
        "unknown controller 'nope'",
        "advisor, heuristic, plateau, need, random, none, schedule",
    ),
    "schedule without a file": (("--controller", "schedule:"), "schedule:FILE.toml"),
    "schedule that is missing": (
        ("--controller", "schedule:gone.toml"),
        "gone.toml does not exist",
    ),
    "schedule that is a folder": (("--controller", "schedule:."), "cannot be read"),
    "device": (("--device", "gpu"), "unknown device 'gpu'", "cpu"),
    "device that is not there": (
        ("--task", "digits", "--device", "cuda:99"),
        "device 'cuda:99' is not available",
        "cpu",
    ),
    "section": (
        ("--set", "nope.x=1"),
        "unknown key nope",
        "run, task, env, reward, governor",
    ),
    "key": (("--set", "run.sed=1"), "unknown key run.sed", "seed, controller, rounds"),
    "set without a value": (("--set", "run.seed"), "SECTION.NAME=VALUE", "'run.seed'"),
    "choice": (
        ("--set", "reward.mode=greedy"),
        "reward.mode",
        "'sparse', 'loss_shaped', 'loss_sparse' or 'priced'",
    ),
    "batch larger than an epoch": (
        ("--task", "digits", "--set", "task.batch_size=1000"),
        "task.batch_size is 1000",
        "997",
    ),
    "samples smaller than the batch": (
        ("--task", "digits", "--set", "task.samples_per_epoch=63"),
        "task.batch_size is 64",
        "63",
    ),
    "agent's device": (("--set", "ppo.device=gpu"), "unknown device 'gpu'", "cpu"),
    "two discounts": (
        ("--task", "digits", "--set", "ppo.gamma=0.9"),
        "ppo.gamma is 0.9",
        "reward.gamma is 0.995",
        "must be equal",
    ),
    "batches of hosts that differ": (
        ("--set", "task.batch_size=16", "--set", "task.optimizer=sgd"),
        "task.batch_size, task.optimizer: the task varied has hosts",
        "--task digits",
    ),
    "data of simulated hosts": (
        ("--task", "planted", "--set", "task.start=trained"),
        "task.start: the task planted has hosts",
    ),
    "part of a round": (
        ("--task", "digits", "--set", "ppo.episodes_per_update=3"),
        "ppo.episodes_per_update is 3",
        "a multiple of 2",
    ),
    "pairs of a rule": (
        ("--controller", "heuristic", "--set", "run.evaluation_pairs=4"),
        "run.evaluation_pairs has no effect here: each round of heuristic is compared",
        "--rounds and --envs",
    ),
    "settings of learning of a rule": (
        ("--controller", "heuristic", "--set", "ppo.width=8"),
        "ppo.width has no effect here: heuristic does not learn",
    ),
    "checkpoint that is missing": (
        ("--controller", "checkpoint:gone"),
        "gone does not exist",
    ),
    "file that is not a checkpoint": (
        ("--controller", "checkpoint:/dev/null"),
        "/dev/null is not a checkpoint",
    ),
    "config that is missing": (("--config", "gone.toml"), "gone.toml does not exist"),
    "config that is a folder": (("--config", "."), "cannot be read"),
    "negative seed": (("--seed", "-1"), "run.seed", "-1"),
    "seed of more than 31 bits": (("--seed", str(2**31)), "run.seed", "less than"),
    "argument": (("more",), "more"),
    "option": (("--nope",), "--nope"),
}


@pytest.mark.trap(12)
@pytest.mark.parametrize("case", RUN)
def test_run_refuses(esper: Esper, case: str) -> None:
    arguments, *wanted = RUN[case]
    refused(esper, ("run", *TINY, "--out", "mine", *arguments), *wanted)


@pytest.mark.parametrize(
    ("flag", "value"), [("--envs", "0"), ("--episode-length", "nan"), ("--rounds", "")]
)
def test_run_refuses_invalid_counts(esper: Esper, flag: str, value: str) -> None:
    refused(esper, ("run", *TINY, "--out", "mine", flag, value))


CONFIGS = {
    "not TOML": ("[run\n", "c.toml cannot be read as TOML", "line 1"),
    "not text": ("\xff\xfe", "c.toml cannot be read"),
    "a section that is a value": ("run = 3\n", "run"),
    "a value outside of sections": ("seed = 3\n", "unknown key seed", "run, task"),
    "a section that is not known": (
        "[tasks]\nname = 'digits'\n",
        "unknown key tasks",
        "task",
    ),
    "a value that is not finite": (
        "[task]\nlearning_rate = nan\n",
        "task.learning_rate",
        "nan",
    ),
    "two mistakes": ("[run]\nsed = 1\n[task]\nname = 3\n", "run.sed", "task.name"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_file_is_refused(esper: Esper, case: str) -> None:
    text, *wanted = CONFIGS[case]
    Path("c.toml").write_text(text, encoding="latin-1")
    refused(esper, ("run", "--config", "c.toml", *TINY, "--out", "mine"), *wanted)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (GERMINATE, ["'norm'", "moss"]),
        (GERMINATE.replace("norm", "moss") + "tempo = 4\n", ["tempo 4", "3, 5, 8"]),
        ("[[action\n", ["a.toml", "line 1"]),
        ("", ["[[action]]"]),
    ],
    ids=["blueprint", "tempo", "not TOML", "nothing"],
)
def test_a_schedule_is_refused(esper: Esper, text: str, wanted: list[str]) -> None:
    """The file is not called a config file, because both --config and schedule:FILE name files."""
    Path("a.toml").write_text(text)
    refused(
        esper,
        ("run", *SIMULATED, "--controller", "schedule:a.toml", "--out", "mine"),
        *wanted,
    )
    said = refused(
        esper,
        ("compare", *SIMULATED, "--arm", "none", "--arm", "schedule:a.toml"),
        "a.toml",
    )
    assert "config file" not in said


def test_a_missing_schedule_is_not_called_a_config_file(esper: Esper) -> None:
    found = esper("compare", *TINY[:4], "--arm", "none", "--arm", "schedule:gone.toml")
    assert "gone.toml" in found.err
    assert "config file" not in found.err


def test_the_folder_of_another_run_is_refused(esper: Esper) -> None:
    assert esper("run", *QUICK).code == 0
    content = {path: path.read_bytes() for path in Path("mine").iterdir()}
    refused(esper, ("run", *QUICK), "mine is not empty", "empty folder")
    assert {path: path.read_bytes() for path in Path("mine").iterdir()} == content


def test_an_empty_folder_is_taken(esper: Esper) -> None:
    Path("mine").mkdir()
    assert esper("run", *QUICK).code == 0
    assert Path("mine/metrics.csv").is_file()


def test_a_file_in_place_of_the_folder_is_refused(esper: Esper) -> None:
    Path("mine").write_text("dear diary")
    refused(esper, ("run", *QUICK), "mine is not empty", "empty folder")
    assert Path("mine").read_text() == "dear diary"


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (("run", "--task", "digit"), "digits"),
        (("run", "--controller", "herustic"), "heuristic"),
        (("run", "--set", "env.n_env=3"), "n_envs"),
        (
            ("run", "--task", "digits", "--set", "env.blueprints=norm,conv_lite"),
            "conv_light",
        ),
        (("compare", "--arm", "none", "--arm", "pretraind"), "pretrained"),
    ],
)
def test_a_misspelt_name_is_answered_with_the_most_similar_one(
    esper: Esper, arguments: tuple[str, ...], meant: str
) -> None:
    refused(esper, arguments, f"did you mean '{meant}'?")


COMPARE: dict[str, tuple[Any, ...]] = {
    "arm": (
        ("--arm", "none", "--arm", "nope"),
        "unknown controller 'nope'",
        "heuristic",
    ),
    "arm named twice": (
        ("--arm", "none", "--arm", "random", "--arm", "none"),
        "two arms have the same name",
        "none",
    ),
    "one arm": (("--arm", "none"), "needs two or more --arm; got only none"),
    "no arm": ((), "--arm"),
    "reference": (
        ("--arm", "none", "--arm", "random", "--reference", "heuristic"),
        "reference",
        "heuristic",
    ),
    "no pairs": (("--arm", "none", "--arm", "random", "--pairs", "0"), "--pairs", "0"),
    "schedule": (
        ("--arm", "none", "--arm", "schedule:gone.toml"),
        "gone.toml does not exist",
    ),
    "json in a folder that is not there": (
        ("--arm", "none", "--arm", "random", "--json", "no/o.json"),
        "no/o.json",
    ),
}


@pytest.mark.parametrize("case", COMPARE)
def test_compare_refuses(esper: Esper, case: str) -> None:
    arguments, *wanted = COMPARE[case]
    refused(esper, ("compare", *TINY[:4], *SMALL, *arguments), *wanted)


def test_compare_does_not_write_over_a_file(esper: Esper) -> None:
    Path("o.json").write_text("dear diary")
    refused(
        esper,
        (
            "compare",
            *TINY[:4],
            *SMALL,
            "--arm",
            "none",
            "--arm",
            "random",
            "--json",
            "o.json",
        ),
        "o.json",
    )
    assert Path("o.json").read_text() == "dear diary"


@pytest.mark.parametrize("assignment", ["run.controller=none", "run.rounds=3"])
def test_compare_refuses_what_it_would_ignore(esper: Esper, assignment: str) -> None:
    """Arms and pairs decide what is played; a value that has no effect is refused."""
    arguments = (
        "compare",
        *TINY[:4],
        *SMALL,
        "--pairs",
        "1",
        "--arm",
        "none",
        "--arm",
        "random",
    )
    refused(esper, (*arguments, "--set", assignment), assignment.partition("=")[0])


def test_info_refuses_a_task_that_is_not_known(esper: Esper) -> None:
    refused(
        esper,
        ("info", "--observation", "--task", "nope"),
        "unknown task 'nope'",
        "digits",
    )


def test_eval_refuses_a_json_file_that_it_could_not_write(
    esper: Esper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused before any host is played, which takes minutes."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    refused(
        esper,
        ("eval", "pretrained", "--json", "o.json"),
        "o.json",
        "that you can write to",
    )


ODD = {
    "empty": "",
    "space": " ",
    "home": "~",
    "nobody": "~nosuchuser/x",
    "negative": "-1",
    "zero": "0",
    "not a number": "nan",
    "infinite": "1e309",
    "large": "9" * 30,
    "larger": "9" * 5000,
    "folder": "folder",
    "full folder": "full",
    "file": "file",
    "pipe": "pipe",
    "nowhere": "no/where",
    "colon": ":",
    "equals": "=",
    "two lines": "a\nb",
    "no text": "\udcff",
    "other letters": "ü",
}
"""Values for any option; most options have no use for any of them."""
NAMES = {*ODD} - {
    *("empty", "home", "nobody", "larger", "file", "pipe"),
    *("folder", "full folder", "nowhere"),
}
"""Values that are names of new files in this folder."""
ACCEPTED: dict[str, set[str]] = {
    "--out": NAMES | {"folder", "nowhere"},
    "--json": NAMES,
    "--config": {"pipe"},
    "--seed": {"zero"},
}
"""All others are refused, and of these "zero" and "pipe" are tried. A pipe without content is an empty config."""
FEW = ("--task", "planted", "--envs", "2", "--episode-length", "4")
VALID: dict[str, tuple[str, ...]] = {
    "run": (*FEW, "--rounds", "1", "--controller", "random"),
    "compare": (*FEW, "--arm", "none", "--arm", "random"),
    "eval": ("pretrained",),
    "report": ("played",),
}
"""Options with which each command begins to work, if it needs any."""


def valued(name: str) -> list[click.Parameter]:
    """The options and arguments of a command that take a value."""
    command = group.get_command(click.Context(group), name)
    assert command is not None
    return [
        parameter
        for parameter in command.params
        if not (isinstance(parameter, click.Option) and parameter.is_flag)
    ]


CASES = [
    pytest.param(name, parameter, id=f"{name} {parameter.opts[0]}")
    for name in COMMANDS
    for parameter in valued(name)
]


@contextmanager
def empty_pipe(name: str) -> Iterator[None]:
    """A pipe whose readers find its end at once."""
    os.mkfifo(name)
    done = threading.Event()

    def end() -> None:
        while not done.is_set():
            os.close(os.open(name, os.O_WRONLY))

    ending = threading.Thread(target=end, daemon=True)
    ending.start()
    try:
        yield
    finally:
        done.set()
        os.close(os.open(name, os.O_RDONLY | os.O_NONBLOCK))
        ending.join()


def begun(*_arguments: Any) -> None:
    """Stands for the work of a command."""
    raise KeyboardInterrupt


@pytest.mark.parametrize(("name", "parameter"), CASES)
def test_every_option_answers_odd_values(
    esper: Esper,
    monkeypatch: pytest.MonkeyPatch,
    recorded: Any,
    name: str,
    parameter: click.Parameter,
) -> None:
    Path("played").symlink_to(recorded.run)
    monkeypatch.setattr(Experiment, "run", begun)
    monkeypatch.setattr(ComparisonRun, "run", begun)
    Path("folder").mkdir()
    Path("full").mkdir()
    Path("full/diary").write_text("dear diary")
    Path("file").write_text("dear diary")
    monkeypatch.setenv("HOME", str(Path("full").absolute()))
    with empty_pipe("pipe"):
        for kind, value in ODD.items():
            option = parameter.opts[0]
            given = (*VALID.get(name, ()), f"{option}={value}")
            if isinstance(parameter, click.Argument):
                given = (value,)
            accepted = ACCEPTED.get(option, set())
            if kind not in accepted:
                refused(esper, (name, *given))
            elif kind in ("zero", "pipe"):
                assert esper(name, *given).code in (0, 130), kind
