"""A run that is killed several times, at any point, ends as an uninterrupted one: the same events and weights.

SIGKILL gives a process no chance to write or print anything.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from esper.config import ConfigError, TrainingConfig
from esper.files import checkpoint
from tests.cli.child import start
from tests.run.run_helpers import growing, kinds, learning, play, same_run, tiny
from tests.telemetry.sample_events import read_events


def killed_at(size: int, *arguments: str, folder: Path) -> bool:
    """Runs the command until the event log has more than ``size`` bytes, and kills it; returns whether it still ran."""
    child = start(*arguments, folder=folder)
    log = folder / "r" / "events.jsonl"
    while child.poll() is None and (not log.exists() or log.stat().st_size <= size):
        time.sleep(0.001)
    child.kill()
    _, err = child.communicate(timeout=60)
    assert child.returncode in (0, -9), err
    return child.returncode != 0


def killed_again_and_again(
    config: TrainingConfig, kills: int, seed: int, folder: Path
) -> int:
    """The run ``folder/r``, killed at random sizes of its event log and, after the last kill, left to end. How often
    it was killed while it was going on from a checkpoint in the middle of a round."""
    (folder / "run.toml").write_text(config.to_toml())
    play(config, folder / "whole")
    whole = (folder / "whole" / "events.jsonl").stat().st_size
    dice = random.Random(seed)
    begun = kinds(folder / "whole").index("EpochCompleted")
    first = sum(
        len(line)
        for line in (folder / "whole" / "events.jsonl")
        .read_bytes()
        .splitlines(True)[:begun]
    )
    sizes = sorted(dice.randrange(first, whole) for _ in range(kills))
    within = 0
    for place, size in enumerate(sizes):
        command = (
            ("run", "--config", "run.toml", "--out", "r")
            if place == 0
            else ("run", "--resume", "r")
        )
        if not killed_at(size, *command, folder=folder):
            return within  # it came to its end in the moment before
        within += bool(checkpoint.read(folder / "r")["collector"]["rollouts"])
    last = start("run", "--resume", "r", folder=folder)
    _, err = last.communicate(timeout=600)
    assert last.returncode == 0, err
    return within


MERGES = {
    "slots": ["r0c0", "r2"],
    "at_once": True,
    "merge": True,
    "edits_per_epoch": 3,
    "one_incubating": False,
}
CONFIGS: dict[str, TrainingConfig] = {
    "random": growing(tiny(rounds=3, seed=7, checkpoint_minutes=1e-9)),
    "learning": growing(learning(checkpoint_minutes=1e-9)),
    "merging": growing(
        tiny(rounds=3, seed=7, checkpoint_minutes=1e-9).with_values(env=MERGES)
    ),
}
"""A checkpoint is written between any two steps, so that some kills come during a write."""


@pytest.mark.trap(30)
@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_a_run_killed_many_times_ends_as_one_that_was_not(
    name: str, tmp_path: Path
) -> None:
    assert killed_again_and_again(CONFIGS[name], 8, 0, tmp_path) > 0
    same_run(tmp_path / "r", tmp_path / "whole")
    if name == "merging":
        events = read_events(tmp_path / "whole" / "events.jsonl")
        assert {"merged", "shrink"} <= {event.get("cause") for event in events}


@pytest.mark.slow
def test_a_run_killed_before_its_first_checkpoint_says_so(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(tiny().to_toml())
    assert killed_at(0, "run", "--config", "run.toml", "--out", "r", folder=tmp_path)
    with pytest.raises(
        ConfigError,
        match=r"no checkpoint at .*checkpoint\.pt; give the folder of a run that has",
    ):
        checkpoint.read(tmp_path / "r")
