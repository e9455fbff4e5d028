"""The folder of a comparison: its settings, every round of every arm as soon as it is played, and the results."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from esper.config import ConfigError, TrainingConfig
from esper.control.names import schedule_file
from esper.evaluation.arm_runner import HostResult
from esper.evaluation.arms import Arm
from esper.files import checkpoint
from esper.files.atomic import write_json
from esper.files.policy_file import PRETRAINED
from esper.files.run_folder import writable
from esper.files.system_info import describe_environment
from esper.rollout.interrupt import interrupts_wait
from esper.telemetry.event import plain

FORMAT = 1
SETTINGS, PLAYED, RESULTS = "comparison.json", "played.jsonl", "results.json"

Played = dict[str, dict[int, list[HostResult]]]
"""Results of the hosts by arm and round."""


class ComparisonFolder:
    """Folder of one comparison. Raises ConfigError if a new one's ``path`` is not empty, before anything is written."""

    def __init__(self, path: Path, resumed: bool) -> None:
        self.path = path
        if not resumed and path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ConfigError(f"{path} is not empty; give --out a new or empty folder")

    def create(self, arms: Sequence[Arm], pairs: int, reference: str) -> None:
        """Creates the folder with the settings and a description of the machine."""
        settings = {
            "format": FORMAT,
            "pairs": pairs,
            "reference": reference,
            "arms": [
                {
                    "name": arm.name,
                    "controller": arm.controller,
                    "of": arm.of,
                    "follows_sha256": follows(arm),
                    "config": arm.config.model_dump(mode="json"),
                }
                for arm in arms
            ],
        }
        with writable(self.path, "folder", "give another --out"):
            self.path.mkdir(parents=True, exist_ok=True)
            write_json(self.path / SETTINGS, settings)
            write_json(self.path / "env.json", describe_environment())

    def settings(self) -> tuple[list[Arm], int, str]:
        """Returns arms, pairs and reference as they were saved by :meth:`create`.

        Raises:
            ConfigError: there is no such folder, it has another format, or a checkpoint or schedule has changed since.
        """
        file = self.path / SETTINGS
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"{self.path} is not the folder of a comparison: it has no {SETTINGS}") from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file} cannot be read: {error}") from None
        if found.get("format") != FORMAT:
            raise ConfigError(
                f"{file} has format {found.get('format')}, but this version of Esper reads format {FORMAT}"
            )
        arms = []
        for entry in found["arms"]:
            config = TrainingConfig.parse(entry["config"])
            arm = Arm(entry["name"], entry["controller"], config, entry["of"])
            if follows(arm) != entry["follows_sha256"]:
                raise ConfigError(
                    f"arm {arm.name!r}: the file that {arm.controller} follows has changed since the comparison began"
                )
            arms.append(arm)
        return arms, int(found["pairs"]), str(found["reference"])

    def keep(self, arm: str, number: int, hosts: Sequence[HostResult]) -> None:
        """Appends a round to the file of played rounds; it is on disk when this returns."""
        line = json.dumps(plain({"arm": arm, "round": number, "hosts": [host.plain() for host in hosts]}))
        with interrupts_wait(), (self.path / PLAYED).open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())

    def played(self, names: Sequence[str]) -> Played:
        """Returns all saved rounds; an incomplete last line is removed from the file."""
        rounds: Played = {name: {} for name in names}
        file = self.path / PLAYED
        if not file.exists():
            return rounds
        content = file.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            with file.open("rb+") as open_file:
                open_file.truncate(len(whole))
        for line in whole.decode("utf-8").splitlines():
            entry = json.loads(line)
            rounds[entry["arm"]][int(entry["round"])] = [HostResult.parse(host) for host in entry["hosts"]]
        return rounds

    def write_results(self, results: dict[str, Any]) -> None:
        write_json(self.path / RESULTS, results)


def follows(arm: Arm) -> str | None:
    """Returns the SHA-256 of the schedule or policy that the arm's controller follows; None if it follows none.

    Raises:
        ConfigError: the file cannot be read.
    """
    kind, _, path = arm.controller.partition(":")
    file = schedule_file(arm.controller, arm.config.task.name)
    if kind == "checkpoint":
        file = Path(path) / checkpoint.NAME if Path(path).is_dir() else Path(path)
    if kind == "pretrained":
        file = PRETRAINED
    if file is None:
        return None
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(f"arm {arm.name!r}: {file} cannot be read: {error.strerror}") from None
