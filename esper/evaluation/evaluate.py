"""Evaluation of a trained agent on held-out hosts: greedy and stochastic, beside the same hosts left alone.

A controller of a user's own plays once.

The hosts may be those of its own task, of another task, or of another width.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

from esper.config import ConfigError, TrainingConfig
from esper.control.spec import ALONE, ControllerSpec
from esper.data.task import Task
from esper.data.user_code import is_user_task, refuse_untrusted, same_task
from esper.env.baseline import Baseline
from esper.env.make import EnvMaker
from esper.env.slot_env import SlotVectorEnv
from esper.evaluation.analysis import ArmComparison, corrected
from esper.evaluation.arms import READ_ONLY_WHILE_LEARNING, check_effects, merged
from esper.evaluation.comparison import ArmResult, environment_without_paths, play_arms
from esper.evaluation.runner import (
    Progress,
    evaluation_work,
    maker_of,
    name_score,
)
from esper.files.policy import SavedPolicy, find_policy
from esper.ppo.policy import Policy
from esper.rollout.own_controller import OwnController
from esper.rollout.rollout import play_round
from esper.rollout.threads import one_thread
from esper.telemetry.score import ACCURACY, ScoreUnit
from esper.telemetry.workload import GROWN, Phase, Workload
from esper.training.execution.ranks import RunRanks
from esper.training.rng import HELD_OUT

GREEDY = "greedy"
STOCHASTIC = "stochastic"
PLANS = "plans"

TASK_SPECIFIC = ("n_envs", "episode_length", "blueprints")
"""Values of the section env that depend on the task, and are dropped for another one."""

UNREAD = dict.fromkeys(
    ("task.name", "run.controller", *READ_ONLY_WHILE_LEARNING),
    "a trained agent plays unchanged; choose its hosts with --task and --pairs",
)
"""Values that have no effect here, or have their own option, and why."""


@dataclass(frozen=True)
class PolicyEvaluation:
    """Result of an evaluation; accuracies are those of committed networks on the test split, in pp."""

    controller: str
    """Name of the controller."""
    origin: str
    """Where a trained agent learned; empty if that is unknown."""
    config: TrainingConfig
    """Config that the hosts were trained with."""
    width: int | None
    """Width of the hosts; None: the task's."""
    arms: tuple[ArmResult, ...]
    """Hosts left alone (``none``), ``greedy`` and ``stochastic``, or the name of a user's own controller in place of
    these two; host i is the same host in each."""
    comparisons: tuple[ArmComparison, ...]
    """Each of the others minus ``none``."""
    unit: ScoreUnit = ACCURACY
    """Display format of the score of hosts; ``arms`` and ``comparisons`` have it in percentage points."""
    informed: bool = True
    """Whether a trained agent had experience with such hosts; without any, it plants next to nothing."""

    @property
    def pairs(self) -> int:
        return len(self.arms[0].accuracy)

    def plain(self) -> dict[str, Any]:
        """Returns everything, ready for JSON."""
        values = {}
        for arm in self.arms:
            values[arm.controller] = {name: column.tolist() for name, column in arm.columns.items()}
        return {
            "controller": self.controller,
            "origin": self.origin,
            **self.score(),
            "arms": values,
            "config": self.config.model_dump(mode="json"),
            "environment": environment_without_paths(),
        }

    def score(self) -> dict[str, Any]:
        """Returns only the figures, ready for JSON."""
        means: dict[str, dict[str, Any]] = {}
        for arm in self.arms:
            means[arm.controller] = {name: float(column.mean()) for name, column in arm.columns.items()}
        for comparison in self.comparisons:
            pair = comparison.pair
            means[pair.name_a] |= {
                "difference": pair.difference,
                "interval": [pair.interval.low, pair.interval.high],
                "p": comparison.adjusted_p,
                "higher_same_lower": [pair.wins, pair.ties, pair.losses],
                "verdict": comparison.verdict,
            }
        return {
            "task": self.config.task.name,
            "width": self.width,
            "seed": self.config.run.seed,
            "pairs": self.pairs,
            "means": means,
        }


def evaluate_controller(
    controller: str | SavedPolicy | OwnController,
    task: Task | str | None = None,
    width: int | None = None,
    changes: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    explore: int = 0,
    work: Workload | None = None,
    ranks: RunRanks | None = None,
) -> PolicyEvaluation:
    """Plays ``controller`` on ``run.evaluation_pairs`` held-out hosts of ``run.seed``.

    These are the hosts that an agent's run with that seed ends with; no agent ever learned on them.

    Args:
        controller: a run folder, its checkpoint, a policy file, or ``pretrained``; or a controller of one's own, as
            ``path.py:function`` or a callable that makes it for an env.
        task: what hosts are trained on; None: the task that it learned on, ``digits`` for one's own controller. A
            user-defined task is code, and is never run just because a file names it: it has to be passed again.
        width: channels of the first block, or features of a token, instead of the task's.
        changes: config values, as nested tables, that replace those of its run.
        progress: called after each arm's round.
        explore: number of rounds that a trained agent plays first, on other hosts, so that it knows what seeds are
            worth there. The bandit `plans` is then evaluated, too, with the same experience.
        work: counts what is done, and estimates the time that is left.
        ranks: the ranks that hosts are spread over, on rank 0; None: all train in this process.

    Raises:
        ConfigError: the controller cannot be played on these hosts; the message says why.
    """
    if isinstance(controller, str) and not ControllerSpec.of(controller).is_code:
        controller = find_policy(controller)
    saved = controller if isinstance(controller, SavedPolicy) else None
    config = hosts_config(saved, task.name if isinstance(task, Task) else task, changes or {})
    maker = maker_of(config, task if isinstance(task, Task) else None, ranks)
    if width is not None:
        maker = maker.with_width(width)
    config = maker.config
    seed = config.run.seed + HELD_OUT
    controllers: dict[str, str | OwnController] = {ALONE: ALONE}
    informed: list[bool] = []  # known when the greedy policy has been made
    if isinstance(controller, SavedPolicy):
        name = controller.name
        origin = controller.origin
        controllers[GREEDY] = partial(_informed, controller, seed, informed)
        controllers[STOCHASTIC] = partial(controller.controller, run_seed=seed, greedy=False)
    else:
        name = ControllerSpec.of(controller).name
        origin = ""
        controllers[name] = controller
    if explore:
        controllers[PLANS] = PLANS

    work = _planned(work or Workload(), maker, controllers, explore)
    experience = None
    baseline = None
    if explore:
        if saved is None:
            raise ConfigError(f"{name} gathers no experience: explore is for a trained agent")
        experience, baseline = explored(maker, saved, explore, work)

    name_score(maker.score, progress)
    pairs = config.run.evaluation_pairs
    # An agent observes the experience, too.
    arms = play_arms(maker, controllers, pairs, progress, baseline, work=work, experience=experience)
    comparisons = corrected([arm.against(arms[0]) for arm in arms[1:]])
    return PolicyEvaluation(
        name,
        origin,
        config,
        width,
        tuple(arms),
        tuple(comparisons),
        unit=maker.score,
        informed=all(informed),
    )


def _informed(policy: SavedPolicy, seed: int, informed: list[bool], env: SlotVectorEnv) -> Policy:
    """Returns the greedy policy for ``env``, and appends whether it has experience with hosts like these."""
    greedy = policy.controller(env, seed)
    informed.append(env.gatherer.given is not None)
    return greedy


def _planned(work: Workload, maker: EnvMaker, controllers: Iterable[str], explore: int) -> Workload:
    """Adds the work of an evaluation, and starts to measure it."""
    env = maker.config.env
    # Simulated hosts have no baseline to measure.
    baseline = 0 if maker.task is None else env.baseline_episodes * env.episode_length
    exploration = explore * env.n_envs * env.episode_length * GROWN
    work.add(
        [
            Phase("baseline", baseline),
            Phase("exploration", exploration),
            evaluation_work(maker.config, controllers),
        ]
    )
    work.start()
    return work


@one_thread()
def explored(maker: EnvMaker, policy: SavedPolicy, rounds: int, work: Workload) -> tuple[dict[str, Any], Baseline]:
    """Returns the experience of ``rounds`` rounds in which the agent samples its actions, and the hosts' baseline.

    They are hosts of the run's seed.
    """
    with closing(maker.make()) as env:
        work.pause()  # the envs were made
        env.configure(count_epochs=work.counter("baseline"))
        baseline = env.prepare().baseline
        env.configure(count_epochs=work.counter("exploration", GROWN))
        sampled = policy.controller(env, maker.config.run.seed, greedy=False)
        for _ in range(rounds):
            play_round(env, sampled)
        return env.gatherer.experiences[0].state_dict(), baseline


def hosts_config(policy: SavedPolicy | None, task: str | None, changes: Mapping[str, Any]) -> TrainingConfig:
    """Returns the config for the hosts: that of its run; for another task, with that task's sizes and rates.

    Without a trained agent, it is the default config. Raises ConfigError for a task that is code and is not named, and
    for a value that is invalid or has no effect.
    """
    check_effects(changes, UNREAD)
    if policy is None:
        tables: dict[str, Any] = {"task": {"name": task or TrainingConfig().task.name}}
    else:
        tables = _tables_of(policy, task)
    config = TrainingConfig.parse(merged(tables, changes))
    if not config.run.evaluation_pairs:
        raise ConfigError("run.evaluation_pairs is 0: an evaluation needs at least 1 host")
    return config


def _tables_of(policy: SavedPolicy, task: str | None) -> dict[str, Any]:
    """Returns the config of an agent's run as nested tables, for hosts of ``task``; None: of its own task."""
    if policy.config is None:
        if task is None:
            raise ConfigError(f"{policy.name} is not in a run folder with a config.toml: name the task with --task")
        return {"task": {"name": task}}
    tables = policy.config.model_dump(mode="json", exclude_none=True)
    learned_on = policy.config.task.name
    if task is None and is_user_task(learned_on):
        raise refuse_untrusted("task", learned_on, policy.name)
    if task is not None and not same_task(learned_on, task):
        # The defaults of the other task apply.
        tables["task"] = {}
        for key in TASK_SPECIFIC:
            tables["env"].pop(key, None)
    if not tables["run"]["evaluation_pairs"]:
        del tables["run"]["evaluation_pairs"]  # its run was not compared
    tables["task"]["name"] = task or learned_on
    return tables
