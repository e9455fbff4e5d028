"""Evaluating a learned policy on held-out hosts: greedy and stochastic actions, beside the same hosts left alone.

The hosts may be those of its own task, of another task, or of another width.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from esper.config import ConfigError, TrainingConfig
from esper.control.controller import Controller
from esper.data.task import Task
from esper.data.user_task import is_user_task, refuse_untrusted, same_task
from esper.env.make import EnvMaker
from esper.env.slot_env import SlotVectorEnv
from esper.evaluation.arm_runner import HELD_OUT
from esper.evaluation.paired import Arm, ArmComparison, against_reference, play_arms
from esper.files.checkpoint import policy_from
from esper.files.policy_source import Learned, find_learned
from esper.files.system_info import check_devices, describe_environment
from esper.hosts.sizes import at_width
from esper.rollout.policies import make_player
from esper.telemetry.event import ArmPlayed
from esper.training.rng import seeded

ALONE, GREEDY, STOCHASTIC = "none", "greedy", "stochastic"

OF_THE_TASK = ("n_envs", "episode_length", "blueprints")
"""Values of the section env that depend on the task, and are dropped for another one."""

WITHOUT_EFFECT = ("task.name", "run.controller", "run.rounds", "run.checkpoint_every", "ppo.")
"""Values that have no effect here, or have their own option."""

Tables = dict[str, Any]


@dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation; accuracies in pp, test split, committed networks."""

    learned: Learned
    config: TrainingConfig
    """Config that the hosts were trained with."""
    width: int | None
    """Width of the hosts; None: the task's."""
    arms: tuple[Arm, ...]
    """Hosts left alone (``none``), ``greedy`` and ``stochastic``; host i is the same host in each."""
    comparisons: tuple[ArmComparison, ...]
    """``greedy`` and ``stochastic``, each minus ``none``."""

    @property
    def pairs(self) -> int:
        return len(self.arms[0].accuracy)

    def plain(self) -> dict[str, Any]:
        """Returns everything, ready for JSON."""
        environment = describe_environment()
        environment["modules"] = sorted(environment["modules"])
        return {
            "controller": self.learned.name,
            "origin": self.learned.origin,
            **self.score(),
            "arms": {
                arm.controller: {
                    "accuracy": arm.accuracy.tolist(),
                    "parameters": arm.parameters.tolist(),
                    "seeds_kept": arm.fossils.tolist(),
                }
                for arm in self.arms
            },
            "config": self.config.model_dump(mode="json"),
            "environment": environment,
        }

    def score(self) -> dict[str, Any]:
        """Returns only the figures, ready for JSON."""
        means: dict[str, dict[str, Any]] = {
            arm.controller: {
                "accuracy": float(arm.accuracy.mean()),
                "parameters": float(arm.parameters.mean()),
                "seeds_kept": float(arm.fossils.mean()),
            }
            for arm in self.arms
        }
        for found in self.comparisons:
            pair = found.pair
            means[pair.name_a] |= {
                "difference": pair.difference,
                "interval": [pair.interval.low, pair.interval.high],
                "p": found.adjusted_p,
                "higher_same_lower": [pair.wins, pair.ties, pair.losses],
                "verdict": found.verdict,
            }
        return {
            "task": self.config.task.name,
            "width": self.width,
            "seed": self.config.run.seed,
            "pairs": self.pairs,
            "means": means,
        }


def _ignore(_event: ArmPlayed) -> None:
    pass


def evaluate_controller(
    controller: str | Learned,
    task: Task | str | None = None,
    width: int | None = None,
    changes: Mapping[str, Any] | None = None,
    progress: Callable[[ArmPlayed], None] = _ignore,
) -> Evaluation:
    """Plays ``controller`` on ``run.evaluation_pairs`` held-out hosts of ``run.seed``.

    These are the hosts that an agent's run with that seed ends with; no agent ever learned on them.

    Args:
        controller: a run folder, its checkpoint, a policy file, or ``pretrained``.
        task: what hosts are trained on; None: the task that it learned on. A user-defined task is code, and is never
            run just because a file names it: it has to be passed again.
        width: channels of the first block, or features of a token, instead of the task's.
        changes: config values, as nested tables, that replace those of its run.
        progress: called after each arm's round.

    Raises:
        ConfigError: the controller cannot be played on these hosts; the message says why.
    """
    learned = find_learned(controller) if isinstance(controller, str) else controller
    given = task if isinstance(task, Task) else None
    config = hosts_config(learned, task.name if isinstance(task, Task) else task, changes or {})
    check_devices(config.run.device)
    maker = EnvMaker.of(config, given)
    if width is not None:
        maker = widened(maker, width)
    seed = maker.config.run.seed + HELD_OUT

    def plays(greedy: bool) -> Callable[[SlotVectorEnv], Controller]:
        return lambda env: policy_from(learned.policy, learned.name, env, seed, greedy)

    players = {
        ALONE: lambda env: make_player(ALONE, maker.config, env, seed),
        GREEDY: plays(greedy=True),
        STOCHASTIC: plays(greedy=False),
    }
    arms = play_arms(maker, players, maker.config.run.evaluation_pairs, seed, progress)
    return Evaluation(learned, maker.config, width, tuple(arms), tuple(against_reference(arms, ALONE)))


def hosts_config(learned: Learned, task: str | None, changes: Mapping[str, Any]) -> TrainingConfig:
    """Returns the config for the hosts: that of its run; for another task, with that task's sizes and rates.

    Raises:
        ConfigError: the task is unknown, or is code that is not named; a value is invalid or has no effect.
    """
    _check_effect(changes)
    if learned.config is None:
        if task is None:
            raise ConfigError(f"{learned.name} is not in a run folder with a config.toml: name the task with --task")
        return TrainingConfig.parse(_merged({"task": {"name": task}}, changes))
    tables = learned.config.model_dump(mode="json", exclude_none=True)
    found = learned.config.task.name
    if task is None and is_user_task(found):
        raise refuse_untrusted(found, learned.name)
    if task is not None and not same_task(found, task):
        tables["task"] = {}
        tables["env"] = {key: value for key, value in tables["env"].items() if key not in OF_THE_TASK}
    tables["task"]["name"] = task or found
    return TrainingConfig.parse(_merged(tables, changes))


def _check_effect(changes: Mapping[str, Any]) -> None:
    for section, values in changes.items():
        for key in values if isinstance(values, dict) else ():
            if f"{section}.{key}".startswith(WITHOUT_EFFECT):
                raise ConfigError(
                    f"{section}.{key} has no effect here: a trained agent plays unchanged; choose its hosts with "
                    "--task and --pairs"
                )


def _merged(tables: Tables, changes: Mapping[str, Any]) -> Tables:
    """Returns nested tables with the values of ``changes`` on top."""
    merged = copy.deepcopy(tables)
    for key, value in changes.items():
        there = merged.get(key)
        merged[key] = _merged(there, value) if isinstance(value, dict) and isinstance(there, dict) else value
    return merged


def widened(maker: EnvMaker, width: int) -> EnvMaker:
    """Returns the env maker with hosts of ``width``. Raises ConfigError if they have no width, or not this one."""
    if maker.task is None:
        raise ConfigError(f"hosts of {maker.config.task.name} are simulated and have no width")
    with seeded(0):  # the weights are not used
        build = at_width(maker.task.build_host(), width)
    return maker.with_hosts(build)
