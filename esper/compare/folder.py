"""The folder of a comparison: its settings, every round of every arm as soon as it is played, and the results."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from esper.agents.script import schedule_file
from esper.agents.spec import ControllerSpec
from esper.compare.arms import Arm
from esper.compare.runner import HostResult, Results
from esper.config import ConfigError, TrainingConfig
from esper.config.files import at_home
from esper.data.user_code import confirmed, is_user_task
from esper.files import checkpoint
from esper.files.atomic import write_atomic, write_json
from esper.files.policy import policy_path
from esper.files.run_folder import writable
from esper.files.system_info import describe_environment
from esper.run.interrupt import interrupts_wait
from esper.telemetry.text import plain

FORMAT = 1
SETTINGS = "comparison.json"
PLAYED = "played.jsonl"
RESULTS = "results.json"
FOLLOWED = "followed"
"""Folder of the files that arms follow, each named after its SHA-256."""


class Settings(NamedTuple):
    """The arms and settings of a comparison, as its folder has them."""

    pairs: int
    """Number of hosts of each arm, or of each of its training seeds."""
    reference: str
    train_seeds: int | None
    """Number of training seeds; None if no arm learns."""
    arms: Sequence[Arm]
    width: int | None = None
    """Width of the hosts; None: the task's."""


class ComparisonFolder:
    """The folder of one comparison."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def create(self, settings: Settings) -> None:
        """Creates the folder with the settings, what arms follow, and a description of the machine."""
        copies: dict[str, bytes] = {}
        entries = []
        for arm in settings.arms:
            followed = _Followed.of(arm)
            entries.append({"name": arm.name, "follows_sha256": followed.sha256, **arm.plain()})
            if followed.copy:
                copies[followed.copy] = followed.content
        saved = {"format": FORMAT, **settings._asdict(), "arms": entries}
        with writable(self.path, "folder", "give another --out"):
            self.path.mkdir(parents=True, exist_ok=True)
            # Before the settings, which make it the folder of a comparison.
            for name, content in copies.items():
                (self.path / FOLLOWED).mkdir(exist_ok=True)
                write_atomic(self.path / FOLLOWED / name, content)
            write_json(self.path / SETTINGS, saved)
            write_json(self.path / "env.json", describe_environment())

    def settings(self, controllers: Sequence[str] = ()) -> Settings:
        """Returns the settings that :meth:`create` saved.

        Args:
            controllers: the user-defined controllers of the arms, named again by the user.

        Raises ConfigError for a missing folder, another format, a user-defined controller that is not named again or
        whose file has changed since, or a damaged copy of what an arm follows.
        """
        settings = self.read()
        arms = []
        for entry in settings["arms"]:
            controller = self._confirmed(entry["controller"], controllers)
            config = TrainingConfig.parse(entry["config"])
            arm = Arm(entry["name"], controller, config, entry["of"])
            followed = _Followed.of(replace(arm, controller=self.follows(arm)))
            if followed.sha256 != entry["follows_sha256"]:
                raise ConfigError(
                    f"arm {arm.name!r}: the file that {arm.controller} follows has changed since the comparison began"
                )
            arms.append(arm)
        return Settings(
            int(settings["pairs"]),
            str(settings["reference"]),
            settings["train_seeds"],
            arms,
            settings["width"],
        )

    def _confirmed(self, controller: str, named: Sequence[str]) -> str:
        """Returns a saved controller; one that is code as the user has named it again."""
        spec = ControllerSpec.of(controller)
        same = next((name for name in named if spec.same_as(ControllerSpec.of(name))), None)
        return ControllerSpec.of(confirmed("controller", controller, same, str(self.path), "--arm")).name

    def follows(self, arm: Arm) -> str:
        """Returns the arm's controller, with the path of the copy that is kept here once there is one.

        The original schedule or policy may have changed or disappeared since, or the folder may have moved.
        """
        if not (self.path / SETTINGS).exists() or not arm.spec.follows:
            return arm.controller
        entry = next(entry for entry in self.read()["arms"] if entry["name"] == arm.name)
        copy = next((self.path / FOLLOWED).glob(f"{entry['follows_sha256']}.*"), None)
        return arm.controller if copy is None else arm.spec.following(copy)

    def read(self) -> dict[str, Any]:
        """Returns the settings as they were saved. Raises ConfigError for a missing folder or another format."""
        file = self.path / SETTINGS
        try:
            settings: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"{self.path} is not the folder of a comparison: it has no {SETTINGS}") from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file} cannot be read: {error}") from None
        written = settings.get("format")
        if written != FORMAT:
            raise ConfigError(f"{file} has format {written}, but this version of Esper reads format {FORMAT}")
        return settings

    def save_round(
        self,
        first: int,
        arm: str,
        number: int,
        hosts: Sequence[HostResult],
        seconds: float,
    ) -> None:
        """Appends a round, which took ``seconds``, to the file of played rounds; it is on disk when this returns.

        ``number`` counts from ``first``, the number of rounds of earlier training seeds.
        """
        entry = {
            "arm": arm,
            "round": first + number,
            "seconds": round(seconds, 3),
            "hosts": [host.plain() for host in hosts],
        }
        line = json.dumps(plain(entry))
        with interrupts_wait(), (self.path / PLAYED).open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())

    def results(self, names: Sequence[str]) -> Results:
        """Returns the hosts of all saved rounds."""
        results: Results = {name: {} for name in names}
        for entry in self._played():
            rounds = results[entry["arm"]]
            rounds[int(entry["round"])] = [HostResult.parse(host) for host in entry["hosts"]]
        return results

    def seconds(self) -> dict[str, float]:
        """Returns the seconds that a host took, by arm, by the clock of the machine that played it.

        They are no result: the same comparison takes others elsewhere.
        """
        hosts: dict[str, int] = defaultdict(int)
        seconds: dict[str, float] = defaultdict(float)
        for entry in self._played():
            hosts[entry["arm"]] += len(entry["hosts"])
            seconds[entry["arm"]] += entry["seconds"]
        return {arm: seconds[arm] / count for arm, count in hosts.items()}

    def _played(self) -> list[dict[str, Any]]:
        """Returns the saved rounds; an incomplete last line is removed from the file."""
        file = self.path / PLAYED
        if not file.exists():
            return []
        content = file.read_bytes()
        complete = content[: content.rfind(b"\n") + 1]
        if complete != content:  # a crash has cut the last line off
            with file.open("rb+") as open_file:
                open_file.truncate(len(complete))
        return list(map(json.loads, complete.decode("utf-8").splitlines()))


def resume_command(folder: Path, arms: Sequence[Arm]) -> str:
    """Returns the command that resumes a comparison, which names a user-defined task and such controllers again."""
    command = ["esper", "compare", "--resume", str(folder)]
    task = arms[0].config.task.name
    if is_user_task(task):
        command += ["--task", task]
    # Each once, in the order of arms.
    for spec in dict.fromkeys(arm.spec for arm in arms):
        if spec.is_code:
            command += ["--arm", spec.name]
    return shlex.join(command)


class _Followed(NamedTuple):
    """The file that an arm's controller follows: a schedule, a policy, the checkpoint of a run, or a Python file."""

    sha256: str | None = None
    """None if the controller follows no file."""
    content: bytes = b""
    copy: str = ""
    """Name of its copy; empty for a Python file, which is not copied: its user names it each time."""

    @classmethod
    def of(cls, arm: Arm) -> _Followed:
        """Reads it. Raises ConfigError if it cannot be read."""
        spec = arm.spec
        file = schedule_file(spec, arm.config.task.name)
        if spec.is_code:
            file = at_home(spec.path)
        elif file is None and spec.follows:
            path = policy_path(spec.path or spec.kind)
            file = checkpoint.newest(path).file if path.is_dir() else path
        if file is None:
            return cls()
        try:
            content = file.read_bytes()
        except OSError as error:
            raise ConfigError(f"arm {arm.name!r}: {file} cannot be read: {error.strerror}") from None
        sha256 = hashlib.sha256(content).hexdigest()
        if spec.is_code:
            return cls(sha256, content)
        return cls(sha256, content, f"{sha256}{file.suffix or '.pt'}")
