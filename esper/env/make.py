"""Makes envs for a task by name, with trained or simulated hosts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from gymnasium.vector import AutoresetMode

from esper.config import TrainingConfig
from esper.config_resolved import ResolvedConfig
from esper.data.task import DataOptions, Task, resolve
from esper.data.tasks import load_task
from esper.env import planted
from esper.env.planted import PlantedVectorEnv
from esper.env.slot_env import SlotVectorEnv
from esper.env.vector_env import GrowthVectorEnv, ignore
from esper.hosts.host import Host
from esper.telemetry.event import Event
from esper.training.execution import workspaces
from esper.training.execution.multi_gpu import devices_of
from esper.training.micro_batching import MicroBatchPolicy


@dataclass(frozen=True)
class EnvMaker:
    """Makes the envs of one run, which share its data."""

    config: ResolvedConfig
    """The config; its type is HostTrainingConfig unless hosts are simulated."""
    task: Task | None
    """The task; None for simulated hosts."""
    parts: MicroBatchPolicy | None = field(default=None, compare=False)
    """How all hosts of the run split batches; None: each env has its own policy."""
    elsewhere: tuple[Task, ...] = field(default=(), compare=False)
    """Copies of the task on the other devices of ``config.run.device``."""

    @classmethod
    def of(cls, config: TrainingConfig, task: Task | None = None) -> EnvMaker:
        """Moves ``task``, or the loaded task ``config.task.name`` if it is None, to ``config.run.device``.

        Raises ConfigError for an unknown task, listing the known ones, or for sizes that the data cannot fill.
        """
        if task is not None:
            config = config.with_values(task={"name": task.name})
        elif config.task.name == planted.NAME:
            return cls(planted.resolve(config), None)
        else:
            task = load_task(config.task.name, DataOptions.of(config.task))
        config, devices = resolve(config, task), devices_of(config.run.device)
        if any(device.type == "cuda" for device in devices):
            workspaces.bound()  # before anything uses cuBLAS
        task, *elsewhere = (task.to(device) for device in devices)
        return cls(config, task, MicroBatchPolicy(config), tuple(elsewhere))

    def with_hosts(self, build_host: Callable[[], Host]) -> EnvMaker:
        """Returns a maker for other hosts; not for simulated ones."""
        assert self.task is not None
        task, *elsewhere = (replace(task, build_host=build_host) for task in (self.task, *self.elsewhere))
        return replace(self, task=task, elsewhere=tuple(elsewhere))

    def make(
        self,
        n_envs: int | None = None,
        emit: Callable[[Event], None] = ignore,
        autoreset_mode: AutoresetMode | str = AutoresetMode.DISABLED,
    ) -> SlotVectorEnv:
        """Makes an env; ``n_envs`` replaces the config's, ``emit`` receives its events (simulated hosts have none)."""
        config = self.config.with_values(env={"n_envs": n_envs}) if n_envs else self.config
        if self.task is None:
            return PlantedVectorEnv(config, autoreset_mode=autoreset_mode)
        return GrowthVectorEnv(
            self.task, config, emit, autoreset_mode=autoreset_mode, parts=self.parts, elsewhere=self.elsewhere
        )


def make_env(config: TrainingConfig, autoreset_mode: AutoresetMode | str = AutoresetMode.DISABLED) -> SlotVectorEnv:
    """Makes the env of ``config.task.name`` on ``config.run.device``; see SlotVectorEnv for ``autoreset_mode``.

    Raises ConfigError as :meth:`EnvMaker.of` does.
    """
    return EnvMaker.of(config).make(autoreset_mode=autoreset_mode)
