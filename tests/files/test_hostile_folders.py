"""Nothing loaded from a run folder runs code: a folder full of traps, and every command that reads one."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import esper
from esper.cli.main import main
from esper.config import ConfigError
from esper.files import checkpoint
from esper.run.experiment import Experiment
from tests.recorded import Recorded
from tests.show.page_helpers import Page

SCRIPT = "<script>alert('{mark}')</script><img src=x onerror=\"fetch('{mark}')\">"


class Trap:
    """Creates a folder when a reader that executes code unpickles it."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.mark),)


@pytest.fixture(scope="module")
def whole(recorded: Recorded, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recorded run that grew, as if it had not finished."""
    folder = tmp_path_factory.mktemp("hostile") / "r"
    shutil.copytree(recorded.grown, folder)
    state = checkpoint.read(folder)
    (folder / checkpoint.NAME).write_bytes(
        checkpoint.encode({**state, "finished": False})
    )
    return folder


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "marked"


@pytest.fixture
def hostile(
    whole: Path, tmp_path: Path, mark: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Every file would leave the mark if it were run; all but the checkpoint are read."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "r"
    shutil.copytree(whole, folder)
    code = f"import os\nos.mkdir({str(mark)!r})\n"
    evil = folder / "evil.py"
    evil.write_text(f"{code}def make_task():\n    {code.splitlines()[1]}\n")
    for name in (
        "conftest.py",
        "sitecustomize.py",
        "esper.py",
        "torch.py",
        "events.py",
    ):
        (folder / name).write_text(code)
    config = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(
        config.replace('name = "digits"', f'name = "{evil}:make_task"')
    )
    script = SCRIPT.format(mark=mark)
    lines = [
        json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()
    ]
    for fields in lines:
        if fields["event"] == "RunStarted":
            fields |= {
                "task": f"{evil}:make_task",
                "folder": script,
                "tier_refused": script,
                "blueprints": [script],
            }
        if fields["event"] == "StageChanged":
            fields |= {"cause": script, "blueprint": script, "slot": f"r0c0{script}"}
        if fields["event"] == "EpochCompleted":
            fields |= {
                "stages": {script: "TRAINING"},
                "reward_terms": {script: 1.0},
                "contributions": {script: 1.0},
            }
    lines.append({"event": "__import__", "schema": 1, "code": code})
    lines.append(
        {
            "event": "Trap",
            "schema": 1,
            "py/object": "os.mkdir",
            "__reduce__": ["os.mkdir", [str(mark)]],
        }
    )
    (folder / "events.jsonl").write_text(
        "".join(json.dumps(fields) + "\n" for fields in lines)
    )
    (folder / "env.json").write_text(
        json.dumps({"python": script, "packages": {script: script}, "cpu": script})
    )
    for name in (checkpoint.NAME, checkpoint.PREVIOUS):
        (folder / name).write_bytes(
            pickle.dumps({"format": 2, "policy": Trap(mark)}, protocol=2)
        )
    return folder


def command(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.argv", ["esper", *arguments])
    try:
        main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def test_the_traps_are_live(hostile: Path, mark: Path) -> None:
    """The tests below would notice an executed trap."""
    pickle.loads((hostile / checkpoint.NAME).read_bytes())
    assert mark.is_dir()
    mark.rmdir()
    exec((hostile / "evil.py").read_text(), {})
    assert mark.is_dir()


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("run --resume r", 2),
        ("run --config r/config.toml --out s", 2),
        ("run --controller checkpoint:r --out s", 2),
        ("show r", 0),
        ("compare --arm checkpoint:r --arm none --out s", 2),
        ("compare --arm a=r/config.toml --arm none --out s", 2),
        ("compare --resume r", 2),
    ],
)
def test_no_command_runs_code_from_a_folder(
    line: str,
    code: int,
    hostile: Path,
    mark: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = command(*line.split(), monkeypatch=monkeypatch)
    said = capsys.readouterr()
    assert "Traceback" not in said.err + said.out
    assert found == code, said.err
    refused = (
        "Esper runs code only when you name it",
        "is not a checkpoint",
        "is not the folder of a comparison",
    )
    assert code == 0 or any(words in said.err for words in refused), said.err
    assert not mark.exists()
    assert not Path("s").exists()
    assert hostile.is_dir()


def test_the_task_of_a_resumed_run_is_refused_by_name_though_its_checkpoint_is_sound(
    hostile: Path, whole: Path, mark: Path
) -> None:
    config = hashlib.sha256((hostile / "config.toml").read_bytes()).hexdigest()
    sound = {**checkpoint.read(whole), "config": config}
    (hostile / checkpoint.NAME).write_bytes(checkpoint.encode(sound))
    with pytest.raises(
        ConfigError, match="Esper runs code only when you name it yourself"
    ):
        Experiment.resume(hostile)
    assert not mark.exists()


def test_a_page_of_such_a_folder_holds_no_script(
    hostile: Path, mark: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command("report", "r", monkeypatch=monkeypatch) == 0
    page = Page((hostile / "report.html").read_text())
    assert not {"script", "link", "iframe", "object", "image"} & set(page.tags)
    for name, value in page.attributes:
        assert not name.startswith("on")
        assert name != "src" or value.startswith("data:image/svg+xml;base64,")
        assert name != "href" or value.startswith("#")
        assert "url(" not in value
    assert "alert(" in page.text  # it is shown, as text
    assert not mark.exists()


def pickled_weights(stem: Path, mark: Path) -> None:
    torch.save({"host": Trap(mark)}, stem.with_name(f"{stem.name}.safetensors"))


def named_task(stem: Path, mark: Path) -> None:
    change(stem, task=f"{stem.parent / 'evil.py'}:make_task")


def named_module(stem: Path, mark: Path) -> None:
    change(stem, task="os:mkdir", topology=f"__import__('os').mkdir({str(mark)!r})")


def named_blueprint(stem: Path, mark: Path) -> None:
    seed = {
        "blueprint": f"__import__('os').mkdir({str(mark)!r})",
        "style": "LINEAR_ADD",
        "alpha": 1.0,
    }
    change(stem, slots={"r0c0": seed})


def header(stem: Path, mark: Path) -> None:
    """Metadata of the weights that name code, which a careless reader might believe."""
    weights = stem.with_name(f"{stem.name}.safetensors")
    tensors = safetensors.torch.load(weights.read_bytes())
    weights.write_bytes(
        safetensors.torch.save(
            tensors, {"format": "pt", "loader": f"os.mkdir({str(mark)!r})"}
        )
    )


def change(stem: Path, **facts: Any) -> None:
    file = stem.with_name(f"{stem.name}.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), **facts}))


@pytest.mark.parametrize(
    "spring", [pickled_weights, named_task, named_module, named_blueprint, header]
)
def test_a_saved_host_runs_nothing(
    spring: Callable[[Path, Path], None], hostile: Path, mark: Path
) -> None:
    """The digest matches the weights, so that they are really read."""
    stem = hostile / "best_host"
    spring(stem, mark)
    change(
        stem,
        weights_sha256=hashlib.sha256(
            stem.with_name("best_host.safetensors").read_bytes()
        ).hexdigest(),
    )
    if spring is header:
        assert isinstance(esper.load_host(stem), torch.nn.Module)  # it is only text
    else:
        with pytest.raises(ConfigError, match=re.escape(str(stem))):
            esper.load_host(stem)
    assert not mark.exists()
