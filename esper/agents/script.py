"""A controller that follows a written schedule of actions, each with a slot and an earliest epoch."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from esper.agents.controller import EnvView, PerEnvController
from esper.agents.spec import ControllerSpec
from esper.config import ConfigError, read_toml
from esper.core.action import RELEVANT, ActionSpec, Op
from esper.core.arrays import Ints
from esper.core.observation import ObservationLayout
from esper.core.stage import SeedStage

logger = logging.getLogger(__name__)

SCHEDULES = Path(__file__).parent / "schedules"


class ScheduleEntry(BaseModel):
    """One action of a schedule; heads that do not matter for ``op`` may be omitted."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    epoch: Annotated[int, Field(ge=0)]
    """Number of completed epochs before the action may be taken."""
    op: str
    slot: str
    blueprint: str | None = None
    style: str = "LINEAR_ADD"
    tempo: int = 5
    alpha_target: float = 1.0
    alpha_speed: int = 0
    alpha_curve: str = "linear"


class ScriptedController(PerEnvController):
    """Follows a schedule in each env.

    An entry is executed at its epoch, or as soon afterwards as it is legal and, for ADVANCE and FOSSILIZE, its gate
    would open. Entries of one slot keep their order. One action is executed per step, so that all entries of an epoch
    need ``env.edits_per_epoch``.
    """

    EPISODE_STATE = ("pending",)

    def __init__(
        self,
        schedule: list[ScheduleEntry],
        spec: ActionSpec,
        layout: ObservationLayout,
        n_envs: int,
        run_seed: int = 0,
    ) -> None:
        super().__init__(spec, layout, n_envs, run_seed)
        # Entries of one epoch keep the order of the file.
        self.schedule = sorted(schedule, key=lambda entry: entry.epoch)
        self.actions = [encode(entry, spec) for entry in self.schedule]
        self.pending: list[list[int]] = [[] for _ in range(n_envs)]
        self.too_large: set[tuple[str, str]] = set()
        """Slots and blueprints of seeds that would exceed the budget, which was said."""

    def begin_episode(self, env: int) -> None:
        self.pending[env] = list(range(len(self.schedule)))

    def acts_again(self, env: int, view: EnvView) -> bool:
        return True

    def choose(self, env: int, view: EnvView) -> Ints:
        waiting: set[str] = set()  # slots with an earlier entry that was not executed yet
        for place in self.pending[env]:
            entry = self.schedule[place]
            if entry.epoch > view.epoch:
                break
            if entry.slot not in waiting and self._ready(entry, view):
                self.pending[env].remove(place)
                return self.actions[place]
            waiting.add(entry.slot)
        return self.spec.encode(Op.WAIT)

    def _ready(self, entry: ScheduleEntry, view: EnvView) -> bool:
        op = Op[entry.op]
        if op in (Op.ADVANCE, Op.FOSSILIZE) and not view.slot(entry.slot, "gate_passed"):
            return False
        if op is Op.GERMINATE:
            self._say_if_too_large(entry, view)
            return view.legal(op, entry.slot, entry.blueprint)
        return view.legal(op, entry.slot)

    def _say_if_too_large(self, entry: ScheduleEntry, view: EnvView) -> None:
        """Logs once that the seed of ``entry`` is not planted because the host has no budget for its parameters."""
        name = entry.blueprint or ""
        s = self.spec.slots.index(entry.slot)
        b = self.spec.blueprints.index(name)
        affordable = view.masks["slot_blueprint"][s, b]
        if affordable or view.stage(entry.slot) is not SeedStage.DORMANT:
            return
        if (entry.slot, name) in self.too_large:
            return
        self.too_large.add((entry.slot, name))
        logger.warning(
            "schedule: %s is not planted in %s while it would exceed the budget of what seeds may add "
            "(env.parameter_budget, env.flop_budget)",
            name,
            entry.slot,
        )


def encode(entry: ScheduleEntry, spec: ActionSpec) -> Ints:
    """Encodes an entry as an action int64 [8]. Raises ConfigError for a value unknown to this host or registry."""
    known = [op.name for op in Op if op is not Op.WAIT]
    if entry.op not in known:
        raise ConfigError(f"schedule, epoch {entry.epoch}: unknown op {entry.op!r}; known: {', '.join(known)}")
    op = Op[entry.op]
    heads: dict[str, Any] = {head: getattr(entry, head) for head in RELEVANT[op]}
    try:
        return spec.encode(op, **heads)
    except ValueError as error:
        raise ConfigError(f"schedule, epoch {entry.epoch}: {error}") from None


def read_schedule(path: Path) -> list[ScheduleEntry]:
    """Reads the ``[[action]]`` tables of a TOML file. Raises ConfigError with the file and the expected format."""
    tables = read_toml(path, "schedule")
    if set(tables) != {"action"} or not isinstance(tables["action"], list):
        raise ConfigError(f"{path}: a schedule consists of [[action]] tables with epoch, op, slot, ...")
    try:
        return [ScheduleEntry.model_validate(table) for table in tables["action"]]
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"])) or "an [[action]]"
        known = ", ".join(ScheduleEntry.model_fields)
        raise ConfigError(f"{path}: {place}: {problem['msg']}; known keys: {known}") from None


def schedule_ships(task: str) -> bool:
    """True if a schedule for this task ships with Esper."""
    return (SCHEDULES / f"{task}.toml").is_file()


def shipped_schedule_fits(task: str, spec: ActionSpec) -> bool:
    """True if a schedule for this task ships with Esper whose slots and blueprints are all among those of ``spec``."""
    try:
        for entry in read_schedule(shipped_schedule(task)):
            encode(entry, spec)
    except ConfigError:  # none ships, or it is for other hosts
        return False
    return True


def shipped_schedule(task: str) -> Path:
    """Returns the schedule that ships for a task. Raises ConfigError listing the tasks that have one."""
    if not schedule_ships(task):
        known = ", ".join(sorted(file.stem for file in SCHEDULES.glob("*.toml")))
        raise ConfigError(f"no schedule ships for task {task!r} (only for: {known}); name a file: schedule:FILE.toml")
    return SCHEDULES / f"{task}.toml"


def schedule_file(controller: ControllerSpec, task: str) -> Path | None:
    """Returns the file of ``schedule`` or ``schedule:FILE``; None for any other controller.

    Raises ConfigError if no schedule ships for the task.
    """
    if controller.kind != "schedule":
        return None
    return Path(controller.path) if controller.path else shipped_schedule(task)
