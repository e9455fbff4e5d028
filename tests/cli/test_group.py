"""The command group `esper`: help, its commands, and its version."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from esper import __version__
from tests.cli.conftest import SIMULATED
from tests.cli.input_helpers import Esper, refused
from tests.selection import slow_except


def test_help_does_not_import_torch() -> None:
    script = (
        "import sys\n"
        "from esper.cli.group import group\n"
        "group(['--help'], standalone_mode=False)\n"
        "print('heavy:', [name for name in ('torch', 'scipy', 'sklearn', 'gymnasium') if name in sys.modules])\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert found.stdout.endswith("heavy: []\n")
    assert "compare" in found.stdout


def test_help_names_the_advisor_where_it_plays(esper: Esper) -> None:
    (demo,) = [line for line in esper("-h").out.splitlines() if " demo " in line]
    assert "the advisor" in demo
    arms, _ = esper("compare", "-h").out.split("Options:")
    assert "\n  advisor " in arms


@pytest.mark.parametrize(
    ("command", "options"),
    [
        (
            "run",
            "--task --envs --episode-length --seed --device --config --set --controller --rounds --out --track "
            "--resume",
        ),
        (
            "compare",
            "--task --envs --episode-length --seed --device --config --set --arm --pairs --reference --json --of --out "
            "--resume",
        ),
        ("report", "--out"),
        ("show", "--help"),
        ("info", "--observation --config --task"),
        ("tasks", "--help"),
    ],
)
def test_help_of_a_command_names_its_options(
    esper: Callable[..., Any], command: str, options: str
) -> None:
    for flag in ("-h", "--help"):
        found = esper(command, flag)
        assert found.code == 0
        assert set(options.split()) <= set(found.out.split())


def test_unknown_commands_are_refused(esper: Esper) -> None:
    refused(esper, ("grow",), "grow", "demo, run, compare")
    refused(esper, ("reprot", "runs/a"), "no command 'reprot' (did you mean 'report'?)")


def test_the_module_is_the_command() -> None:
    """The version is read from the package, not from the metadata of an installed distribution."""
    command = [sys.executable, "-m", "esper.cli.main", "--version"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout == f"esper, version {__version__}\n"


LONG = "x" * 300


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "--out", LONG, "--task", "planted"),
        ("run", "--resume", LONG),
        ("run", "--task", "planted", "--controller", f"schedule:{LONG}"),
        ("run", "--task", f"{LONG}.py:f"),
        ("show", LONG),
        ("eval", LONG),
        (
            "compare",
            "--task",
            "planted",
            "--arm",
            "none",
            "--arm",
            "random",
            "--out",
            LONG,
        ),
        ("compare", "--resume", LONG),
    ],
    ids=lambda arguments: " ".join(arguments).replace(LONG, "LONG"),
)
def test_a_path_that_cannot_be_looked_up_is_refused_in_one_sentence(
    esper: Esper,
    tmp_path: Path,
    arguments: tuple[str, ...],
) -> None:
    found = esper(*arguments)
    assert found.code == 2
    assert "Traceback" not in found.err
    assert list(tmp_path.iterdir()) == []


def test_a_config_that_begins_with_a_byte_order_mark_is_read(
    esper: Esper, tmp_path: Path
) -> None:
    file = tmp_path / "config.toml"
    file.write_text(
        '\ufeff[task]\nname = "planted"\n[run]\nrounds = -1\n', encoding="utf-8"
    )
    assert "run.rounds" in esper("run", "--config", str(file)).err, (
        "the config was parsed up to the invalid value"
    )


PRINTING = """
import sys
from esper.cli.main import main
from esper.telemetry.text import print_anywhere

print_anywhere()
print("5 ± 1 – 実 ✓")
for command in {commands!r}:
    code = 0
    sys.argv = ["esper", *command]
    try:
        main()
    except SystemExit as stop:
        code = stop.code or 0
    print("code", code)
"""
"""Several commands in one process, each with its exit code."""


@pytest.mark.parametrize("encoding", slow_except(["ascii"], ["ascii", "gbk"]))
def test_characters_that_a_terminal_lacks_are_printed_as_question_marks(
    encoding: str, tmp_path: Path
) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}
    commands = (["--help"], ["show", str(tmp_path / "läufe – 実")])
    script = PRINTING.format(commands=commands)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, env=environment
    )
    lines = done.stdout.decode(encoding, "replace").splitlines()
    assert lines[0].startswith("5 ")
    assert [line for line in lines if line.startswith("code ")] == [
        "code 0",
        "code 2",
    ], done.stderr
    assert b"Traceback" not in done.stderr


def test_runs_without_a_name_that_start_together_have_folders_of_their_own(
    esper: Esper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.strftime", lambda _form: "20260101-000000")
    arguments = (*SIMULATED, "--controller", "none", "--rounds", "1")
    for _ in range(2):
        assert esper("run", *arguments).code == 0
    names = sorted(folder.name for folder in (tmp_path / "runs").iterdir())
    assert names == ["planted-none-20260101-000000", "planted-none-20260101-000000-2"]
    assert esper("run", "--task", "planted", "--envs", "0").code == 2
    assert len(list((tmp_path / "runs").iterdir())) == 2, (
        "a refused run leaves no folder"
    )


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", ">&- 2>&- <&-"])
def test_closed_streams_end_no_command(closed: str, tmp_path: Path) -> None:
    for command, code in (("tasks", 0), ("sites x.py:f", 2), ("run --envs x", 2)):
        words = f"{sys.executable} -m esper {command} {closed}"
        found = subprocess.run(["bash", "-c", words], cwd=tmp_path, capture_output=True)
        assert found.returncode == code
        assert b"Traceback" not in found.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_full_device_ends_a_command_with_a_sentence() -> None:
    words = f"{sys.executable} -m esper tasks > /dev/full"
    found = subprocess.run(["bash", "-c", words], capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (1, "Error: No space left on device\n")


def test_wrong_input_is_refused_without_loading_torch(tmp_path: Path) -> None:
    """Loading torch takes seconds of one core."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    (tmp_path / "broken.toml").write_text("[[action\n")
    for pipe in ("pipe", "pipe.py"):
        os.mkfifo(tmp_path / pipe)
    wrong = [
        "run --set a.b=3",
        "run --task nope",
        "run --device gpu",
        "run --set run.device=cpu,tpu",
        "run --set ppo.device=auto",
        "run --set env.slots=nope",
        "run --episode-length 3",
        "run --set task.batch_size=16",
        "run --task planted --set task.start=trained",
        "run --task digits --set env.slots=r9",
        "run --task digits --set env.blueprints=lora",
        "run --set env.blueprints=norm",
        "run --task digits --set task.batch_size=998",
        "run --task digits --set task.start=gone",
        "run --set ppo.gamma=0.9",
        "run --device cuda",
        "run --track wandb",
        "run --task planted --processes 2",
        "run --task digits --processes 9",
        "run --task gone.py:make",
        "run --controller checkpoint:gone",
        "run --controller gone.py:make",
        "run --controller checkpoint:pipe",
        "run --controller pipe.py:make",
        "run --task pipe.py:make",
        "run --task digits --controller schedule:broken.toml",
        "run --out full",
        "run --resume gone",
        "compare --arm none --arm schedule:gone.toml",
        "compare --arm none --arm random --out full",
        "compare --arm none --arm random --reference gone",
        "compare --arm none",
        "compare --arm none --arm checkpoint:pipe",
        "compare --task digits --arm none --arm schedule:broken.toml",
        "compare --task varied --arm none --arm random --set env.slots=nope",
        "compare --arm none --arm random --device gpu",
        "compare --arm none --arm random:env.slots=r9",
        "compare --arm none --arm ppo:ppo.gamma=0.9",
        "compare --resume gone",
        "eval gone",
        "eval pipe",
        "eval pipe.py:make",
        "eval pretrained --set a.b=3",
        "eval pretrained --set task.name=digits",
        "eval pretrained --device gpu",
        "eval pretrained --task digits --set env.slots=r9",
        "eval pretrained --seed -1",
        "eval pretrained --task nope",
        "demo --out full",
        "report gone",
        "show gone",
        "sites gone.py:make",
        "sites pipe.py:make",
        "info --observation --task nope",
        "info --observation --task varied",
    ]
    script = (
        "import sys\n"
        "from esper.cli.main import main\n"
        f"for line in {wrong!r}:\n"
        "    sys.argv = ['esper', *line.split()]\n"
        "    try:\n"
        "        main()\n"
        "    except SystemExit as ended:\n"
        "        print(line, ended.code, 'torch' in sys.modules)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        timeout=500,  # a command that opens a pipe waits for ever
    )
    assert found.stdout.splitlines() == [f"{line} 2 False" for line in wrong]
