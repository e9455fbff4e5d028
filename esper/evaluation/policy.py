"""What an agent has learned, on hosts that it never saw: its likeliest actions, and its actions as it drew them when it
learned, beside the same hosts left alone; on its own task, another one, or hosts of another width."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from esper.config import ConfigError, TrainingConfig
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
from esper.rollout.rollout import Player
from esper.telemetry.event import ArmPlayed
from esper.training.randomness import seeded

ALONE, GREEDY, STOCHASTIC = "none", "greedy", "stochastic"

OF_THE_TASK = ("n_envs", "episode_length", "blueprints")
"""Values of the section env that are another task's own."""

WITHOUT_EFFECT = ("task.name", "run.controller", "run.rounds", "run.checkpoint_every", "ppo.")
"""Values that decide nothing here, or have an option of their own."""

Tables = dict[str, Any]


@dataclass(frozen=True)
class Evaluation:
    """What came of it; accuracies pp, test split, committed networks."""

    learned: Learned
    config: TrainingConfig
    """What the hosts were trained by."""
    width: int | None
    """Of the hosts, where it is not the task's."""
    arms: tuple[Arm, ...]
    """Left alone (``none``), ``greedy``, ``stochastic``; host i of each is the same host."""
    comparisons: tuple[ArmComparison, ...]
    """``greedy`` and ``stochastic``, each minus ``none``."""

    @property
    def pairs(self) -> int:
        return len(self.arms[0].accuracy)

    def plain(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
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
        """The figures alone, ready for JSON."""
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
    """Play ``controller`` on the held-out hosts of ``run.seed``, ``run.evaluation_pairs`` of them.

    They are those that a run of an agent with that seed ends on: other hosts than any agent ever learned from.

    Args:
        controller: a run folder, its checkpoint, a policy in a file, or ``pretrained``.
        task: what hosts are trained on; None: the task that it learned on. A task of the user's is code, which is never
            run because a file names it: it has to be given again.
        width: channels of the first block, or features of a token, in place of the task's.
        changes: values of the config, as nested tables, in place of those of its run.
        progress: hears of each arm's round.

    Raises:
        ConfigError: what cannot be played, and why.
    """
    learned = find_learned(controller) if isinstance(controller, str) else controller
    given = task if isinstance(task, Task) else None
    config = hosts_config(learned, task.name if isinstance(task, Task) else task, changes or {})
    check_devices(config.run.device)
    maker = EnvMaker.of(config, given)
    if width is not None:
        maker = widened(maker, width)
    seed = maker.config.run.seed + HELD_OUT

    def plays(greedy: bool) -> Callable[[SlotVectorEnv], Player]:
        return lambda env: policy_from(learned.policy, learned.name, env, seed, greedy)

    players = {
        ALONE: lambda env: make_player(ALONE, maker.config, env, seed),
        GREEDY: plays(greedy=True),
        STOCHASTIC: plays(greedy=False),
    }
    arms = play_arms(maker, players, maker.config.run.evaluation_pairs, seed, progress)
    return Evaluation(learned, maker.config, width, tuple(arms), tuple(against_reference(arms, ALONE)))


def hosts_config(learned: Learned, task: str | None, changes: Mapping[str, Any]) -> TrainingConfig:
    """What hosts are trained by: the config of its run, for another task with the sizes and rates of that one.

    Raises ConfigError: a task that is not known, or code that is not named; a value that is wrong or has no effect.
    """
    _check_effect(changes)
    if learned.config is None:
        if task is None:
            raise ConfigError(f"{learned.name} lies beside no config.toml of a run: say with --task what it is to play")
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
                    f"{section}.{key} means nothing here: what has learned plays as it is; --task and --pairs say what"
                )


def _merged(tables: Tables, changes: Mapping[str, Any]) -> Tables:
    """Nested tables with the values of ``changes`` in place of what was there."""
    merged = copy.deepcopy(tables)
    for key, value in changes.items():
        there = merged.get(key)
        merged[key] = _merged(there, value) if isinstance(value, dict) and isinstance(there, dict) else value
    return merged


def widened(maker: EnvMaker, width: int) -> EnvMaker:
    """The same with hosts of that width. Raises ConfigError where hosts have none, or not that one."""
    if maker.task is None:
        raise ConfigError(f"hosts of {maker.config.task.name} are simulated and have no width")
    with seeded(0):  # its weights are not used
        build = at_width(maker.task.build_host(), width)
    return maker.with_hosts(build)
