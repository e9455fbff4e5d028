"""Makes envs for a task by name, with trained or simulated hosts; also for ``gymnasium.make`` and ``make_vec``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from reprlib import repr as short
from types import MappingProxyType
from typing import Any

from gymnasium.vector import AutoresetMode

from esper.config import ConfigError, EnvConfig, TaskConfig, TrainingConfig
from esper.config.resolved import ResolvedConfig
from esper.config.task import NEW, TRAINED
from esper.data.facts import check_processes
from esper.data.names import ENV_ONLY, require_read
from esper.data.task import DataOptions, Task, resolve
from esper.data.tasks import load_task
from esper.env import planted, varied
from esper.env.planted import PlantedVectorEnv
from esper.env.rank_hosts import RankServer
from esper.env.single import SingleEnv
from esper.env.slot_env import SlotVectorEnv
from esper.env.start import recorded, started
from esper.env.varied import VariedVectorEnv
from esper.env.vector_env import GrowthVectorEnv, ignore
from esper.hosts.host import Host
from esper.hosts.sizes import at_width
from esper.ops.torch_state import training_state
from esper.telemetry.event import Event
from esper.telemetry.score import ACCURACY, ScoreUnit
from esper.training.execution.capabilities import bound_workspaces
from esper.training.execution.multi_gpu import chosen_devices, devices_of
from esper.training.execution.ranks import RunRanks
from esper.training.rng import seeded


@dataclass(frozen=True)
class EnvMaker:
    """Makes the envs of one run, which share its data."""

    config: ResolvedConfig
    """The config; its type is HostTrainingConfig unless hosts are simulated."""
    task: Task | None
    """The task; None for hosts that are simulated, or drawn for each episode."""
    ranks: RunRanks | None = field(default=None, compare=False)
    """The ranks that hosts are spread over; None: all train in this process."""
    elsewhere: tuple[Task, ...] = field(default=(), compare=False)
    """Copies of the task on the other devices of ``config.run.device``."""

    @classmethod
    @training_state()
    def of(
        cls,
        config: TrainingConfig,
        task: Task | None = None,
        ranks: RunRanks | None = None,
    ) -> EnvMaker:
        """Moves ``task``, or the loaded task ``config.task.name`` if it is None, to ``config.run.device``.

        The maker's config names the devices that ``auto`` stands for on this machine, which is that of rank 0.
        Raises ConfigError for an unknown task, listing the known ones, for sizes that the data cannot fill, and for
        ``ranks`` that outnumber the hosts.
        """
        if task is None and config.task.name in ENV_ONLY:
            require_read(config)
            if config.task.name == varied.NAME:
                drawn = varied.resolve(config)
                if ranks is not None:
                    check_processes(varied.NAME, ranks.size, drawn.env.n_envs)
                return cls(drawn, None, ranks)
            if ranks is not None:
                check_processes(config.task.name, ranks.size, None)
            return cls(planted.resolve(config), None)
        config = config.with_values(run={"device": chosen_devices(config.run.device)})
        if task is not None:
            config = config.with_values(task={"name": task.name})
        else:
            if ranks is not None:
                _call_others(ranks, RankServer.load, config)  # while this rank loads it
            task = load_task(config.task.name, DataOptions.of(config.task))

        config = recorded(config)
        task = started(task, config.task.start)
        resolved = resolve(config, task)
        run = config.run if ranks is None else ranks.own(config.run)
        if ranks is not None:
            check_processes(config.task.name, ranks.size, resolved.env.n_envs)

        devices = devices_of(run.device)
        if any(device.type == "cuda" for device in devices):
            bound_workspaces()  # before anything uses cuBLAS
        tasks = [task.to(device) for device in devices]
        return cls(
            resolved,
            tasks[0],
            ranks,
            tuple(tasks[1:]),
        )

    @property
    def score(self) -> ScoreUnit:
        """Display format of the score of hosts."""
        if self.config.task.name == varied.NAME:
            return varied.score_of(self.config)
        return ACCURACY if self.task is None else self.task.score_shown

    def with_width(self, width: int) -> EnvMaker:
        """Returns a maker for hosts of another width, see ``at_width``. Raises ConfigError if they cannot have it."""
        if self.task is None:
            raise ConfigError(f"hosts of {self.config.task.name} have no width to be set")
        if self.config.task.start not in (NEW, TRAINED):
            raise ConfigError(f"hosts of another width cannot start from {self.config.task.start}, see task.start")
        with seeded(0):  # the weights are not used
            build_host = at_width(self.task.build_host, width)
        if self.ranks is not None:
            _call_others(self.ranks, RankServer.widen, self.config, width)
        return self.with_hosts(build_host)

    def with_hosts(self, build_host: Callable[[], Host]) -> EnvMaker:
        """Returns a maker for other hosts of this process. Raises ConfigError if hosts are simulated."""
        if self.task is None:
            raise ConfigError(f"hosts of {self.config.task.name} cannot be replaced")
        task = self.task.with_hosts(build_host)
        elsewhere = tuple(copy.with_hosts(build_host) for copy in self.elsewhere)
        return replace(self, task=task, elsewhere=elsewhere)

    def make(
        self,
        n_envs: int | None = None,
        emit: Callable[[Event], None] = ignore,
        autoreset_mode: AutoresetMode | str = AutoresetMode.DISABLED,
    ) -> SlotVectorEnv:
        """Makes an env; ``n_envs`` replaces the config's, ``emit`` receives its events (simulated hosts have none)."""
        config = self.config
        if n_envs:
            config = config.with_values(env={"n_envs": n_envs})
        if self.task is None:
            if config.task.name == varied.NAME:
                own_emit = None if emit is ignore else emit
                return VariedVectorEnv(config, own_emit, autoreset_mode, ranks=self.ranks)
            return PlantedVectorEnv(config, autoreset_mode=autoreset_mode)
        return GrowthVectorEnv(
            self.task,
            config,
            emit,
            autoreset_mode=autoreset_mode,
            elsewhere=self.elsewhere,
            ranks=self.ranks,
        )


def _call_others(ranks: RunRanks, method: Callable[..., Any], *arguments: Any) -> None:
    """Calls a method of ``RankServer`` on all other ranks."""
    ranks.start(dict.fromkeys(range(1, ranks.size), (method, *arguments)))


def make_env(
    config: TrainingConfig,
    autoreset_mode: AutoresetMode | str = AutoresetMode.DISABLED,
    task: Task | None = None,
) -> SlotVectorEnv:
    """Makes the env of ``task``, or of the task that ``config`` names, on ``config.run.device``.

    See SlotVectorEnv for ``autoreset_mode``. Raises ConfigError as :meth:`EnvMaker.of` does.
    """
    return EnvMaker.of(config, task).make(autoreset_mode=autoreset_mode)


PLAIN = {
    **dict.fromkeys(set(TaskConfig.model_fields) - {"name"}, "task"),
    **dict.fromkeys(set(EnvConfig.model_fields) - {"n_envs"}, "env"),
}
"""Config fields that are keywords themselves, with their sections; the other keywords are sections and take dicts."""


def make_vector(
    num_envs: int = 1,
    task: str | None = None,
    config: TrainingConfig | Mapping[str, Any] | None = None,
    autoreset_mode: AutoresetMode | str = AutoresetMode.SAME_STEP,
    render_mode: None = None,
    **keywords: Any,
) -> SlotVectorEnv:
    """Makes the env of ``gymnasium.make_vec("esper/Growth-v0", ...)``.

    Args:
        num_envs: number of hosts, which train together.
        task: a name that `esper tasks` lists; None takes it from ``config``, whose default is ``digits``.
        config: the whole configuration, or its tables.
        autoreset_mode: SAME_STEP or DISABLED, see SlotVectorEnv.
        render_mode: must be None: there is nothing to render.
        keywords: override ``config``: any field of its sections ``env`` and ``task``, such as ``episode_length=20``,
            and the other sections as dicts, such as ``reward={"mode": "sparse"}``.

    Raises ConfigError for an invalid value or an unknown task, TypeError for an unknown keyword or a render mode, and
    ValueError for another autoreset mode.
    """
    if render_mode is not None:
        raise TypeError(f"render_mode is None, because there is nothing to render, not {render_mode!r}")
    return make_env(_configured(num_envs, task, config, keywords), autoreset_mode)


def make_single(**keywords: Any) -> SingleEnv:
    """Makes the env of ``gymnasium.make("esper/Growth-v0", ...)``: one host.

    It takes the keywords of :func:`make_vector` except ``num_envs`` and ``autoreset_mode``, which raise TypeError. If
    they do not name a run seed, the first reset without a seed draws one.
    """
    refused = {"num_envs", "autoreset_mode"} & set(keywords)
    if refused:
        raise TypeError(f"{', '.join(sorted(refused))}: not available for one env; use gymnasium.make_vec for many")
    env = make_vector(1, autoreset_mode=AutoresetMode.DISABLED, **keywords)
    return SingleEnv(env, draws=not _names_a_seed(**keywords))


def _names_a_seed(
    config: TrainingConfig | Mapping[str, Any] | None = None,
    run: Mapping[str, Any] = MappingProxyType({}),
    **_more: Any,
) -> bool:
    """Whether keywords of :func:`make_vector` set the run seed."""
    if "seed" in run:
        return True
    if config is None:
        return False
    if isinstance(config, TrainingConfig):
        return "seed" in config.run.model_fields_set
    return "seed" in config.get("run", ())


def _configured(
    num_envs: int,
    task: str | None,
    config: TrainingConfig | Mapping[str, Any] | None,
    keywords: Mapping[str, Any],
) -> TrainingConfig:
    """Returns the config of :func:`make_vector`'s arguments."""
    base = config
    if not isinstance(base, TrainingConfig):
        base = TrainingConfig.parse(dict(base or {}))
    if base.env.n_envs not in (None, num_envs):
        raise ConfigError(f"num_envs is {num_envs}, but env.n_envs of the config is {base.env.n_envs}; omit the latter")
    tables: dict[str, dict[str, Any]] = {name: {} for name in TrainingConfig.model_fields}
    for name, value in keywords.items():
        if name in PLAIN:
            tables[PLAIN[name]][name] = value
        elif name not in tables:
            # ``task`` is a name here, and no section.
            sections = [section for section in tables if section != "task"]
            known = ["num_envs", "task", "config", "autoreset_mode", *sections, *sorted(PLAIN)]
            raise TypeError(f"got an unexpected keyword argument {name!r}; known: {', '.join(known)}")
        elif not isinstance(value, Mapping):
            raise TypeError(f"{name} must be a dict of values of that section of the config, not {short(value)}")
        else:
            tables[name] |= value
    tables["env"]["n_envs"] = num_envs
    if task is not None:
        tables["task"]["name"] = task
    return base.with_values(**tables)
