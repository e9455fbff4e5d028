"""GrowthVectorEnv: many hosts in training as one ``gymnasium.vector.VectorEnv``.

One step trains every host for one epoch. What a controller needs travels through the Gymnasium API only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gymnasium.vector import AutoresetMode

from esper.config import TrainingConfig
from esper.config.resolved import HostTrainingConfig
from esper.core.blueprints import BLUEPRINTS, BlueprintRegistry
from esper.core.slots import Floats
from esper.core.state import Baseline, EpisodeRules, Setting
from esper.data.host_checks import check_hosts
from esper.data.task import Task, resolve
from esper.env.catalog import BlueprintCatalog
from esper.env.no_growth import measure_baseline
from esper.env.rank_hosts import RankedBackend, copy_of
from esper.env.slot_env import SlotVectorEnv
from esper.env.training_backend import TrainingBackend
from esper.hosts.example import tensors_in
from esper.hosts.inputs import Inputs
from esper.ops import _native
from esper.ops.torch_state import training_state
from esper.telemetry.event import BaselineMeasured, Event, StepsNotCaptured
from esper.telemetry.span import Spans
from esper.training.execution.ranks import RunRanks
from esper.training.execution.tiers import make_executor, prepare_hosts
from esper.training.executor import Execution
from esper.training.host_trainer import HostTrainer, device_index, make_trainings
from esper.training.host_training import HostTraining
from esper.training.precision import Arithmetic
from esper.training.rng import seeded


def ignore(_event: object) -> None:
    pass


def setting_of(
    task: Task,
    config: HostTrainingConfig,
    sample: Inputs,
) -> Setting:
    """Returns what is known of the training of the hosts of ``task``, of which ``sample`` is a batch."""
    values = sum(tensor.numel() for tensor in tensors_in(sample))
    return Setting(
        samples=task.samples,
        updates=config.task.samples_per_epoch // config.task.batch_size,
        inputs=values // len(sample),
        classes=task.guessed or 0,
        learning_rate=config.task.learning_rate,
    )


class GrowthVectorEnv(SlotVectorEnv):
    """Hosts of one task, trained and grown together.

    Args:
        task: what hosts are trained on; its splits lie on the device that hosts train on.
        elsewhere: the same task on more devices of the same kind, which hosts take in turn.
        config: sizes left to the task are taken from it.
        emit: receives typed events, on the thread that calls ``step``.
        baseline: the no-growth curves; None measures them at the first reset.
        blueprints: what seeds can be; None takes the built-in registry as it is now. ``config.env.blueprints`` says
            which of the host's topology a controller may choose, None for all.
        autoreset_mode: DISABLED or SAME_STEP, see SlotVectorEnv.
        ranks: the ranks that hosts are spread over; None: all train in this process.

    Raises:
        ConfigError: sizes that the task's data cannot serve, a host that does not fit the task, or blueprints that are
            not known.
        ValueError: another autoreset mode.
    """

    config: HostTrainingConfig
    execution: Execution

    @training_state()
    def __init__(
        self,
        task: Task,
        config: TrainingConfig,
        emit: Callable[[Event], None] = ignore,
        baseline: Baseline | None = None,
        blueprints: BlueprintRegistry | None = None,
        autoreset_mode: AutoresetMode | str = AutoresetMode.DISABLED,
        elsewhere: Sequence[Task] = (),
        ranks: RunRanks | None = None,
    ) -> None:
        config = resolve(config, task)
        n_envs = config.env.n_envs
        arithmetic = Arithmetic(config.task.precision, task.device)
        config = config.with_values(task={"precision": arithmetic.precision})
        # Hosts are tried out before any of them is kept.
        with seeded(0), arithmetic.casting():
            check_hosts(task, arithmetic.image_dtype)
        self.task = task
        self.tasks = (task, *elsewhere)[:n_envs]
        self.ranks = ranks
        self.emit = emit

        run = config.run if ranks is None else ranks.own(config.run)
        mine = range(n_envs) if ranks is None else ranks.share(n_envs)
        of_env = [self.tasks[device_index(i, len(self.tasks))] for i in mine]
        self.training = make_trainings(of_env, [config] * len(mine), mine, len(self.tasks))
        """The hosts of this process, which come first; :meth:`host` returns any host."""
        self.blueprints = BLUEPRINTS.copy_of(blueprints)
        first = self.training[0]
        host = first.host
        catalog = BlueprintCatalog.select(
            host.topology,
            host.sites,
            self.blueprints,
            config.env.blueprints,
            grows=bool(config.env.merge),
        )
        spec = catalog.spec
        choices = catalog.choices(host, first.sample, config.env.at_once)

        spans = Spans(marks=config.telemetry.debug)
        self.executor = make_executor(run, *(task.device for task in self.tasks))
        execution = prepare_hosts(run, self.training, self.executor)
        trainer = HostTrainer(task, self.training, self.executor)
        self.local = TrainingBackend(trainer, catalog, spans)
        """The hosts of this process."""
        self.backend: TrainingBackend | RankedBackend = self.local
        if ranks is not None:
            self.backend = RankedBackend(ranks, self.local, config, range(n_envs))
        super().__init__(
            config,
            spec,
            self.backend,
            spans,
            choices,
            setting_of(task, config, first.sample),
            autoreset_mode,
            self._emit if emit is not ignore and config.telemetry.of_hosts else None,
        )
        self.baseline = baseline
        self.execution = execution
        self._not_captured = {execution.refused}  # the run's header says so
        """Reported reasons why work is left to PyTorch."""
        # Staging of shared batches is timed among the phases.
        if trainer.batches is not None:
            trainer.batches.spans = spans

    def host(self, env: int) -> HostTraining:
        """Returns the host of an env in training; if another rank has it, a copy to read."""
        if isinstance(self.backend, RankedBackend) and env >= len(self.training):
            return copy_of(self.backend, env, self.task, self.config, self.state)
        return self.training[env]

    def _no_growth(self) -> Baseline:
        """Measures the baseline unless it was given."""
        baseline = self.baseline
        if baseline is None:
            baseline = measure_baseline(
                self.tasks,
                self.config,
                self.executor,
                self.run_seed,
                self.ranks,
            )
        baseline.check(self.horizon)
        measured = BaselineMeasured(
            baseline.episodes,
            baseline.accuracy,
            baseline.loss,
            baseline.final_loss_std,
            baseline.class_accuracy,
        )
        self._emit(measured)
        return baseline

    def _report(
        self,
        rules: EpisodeRules,
        envs: list[int],
        rewards: Floats,
    ) -> None:
        """Reports new reasons why work is left to PyTorch, then the epoch of each env.

        With ``ESPER_REQUIRE_NATIVE=1``, such a reason is an error if the config names the tier.
        """
        for reason in self.executor.reasons():
            if reason in self._not_captured:
                continue
            self._not_captured.add(reason)
            self._emit(StepsNotCaptured(reason))
            if self.config.run.tier in ("graph", "native"):
                _native.refuse_fallback("steps are left to PyTorch", reason)
        super()._report(rules, envs, rewards)

    def _emit(self, event: Event) -> None:
        with self.spans("telemetry"):
            self.emit(event)
