"""Evaluation of a trained agent on held-out hosts: greedy and stochastic, beside the same hosts left alone.

The evaluation is a comparison. A custom controller plays once. The hosts may be those of the agent's own task, of
another task, or of another width.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from esper.agents.spec import ALONE, ControllerSpec
from esper.compare.arms import UNREAD, Arm, check_effects, merged
from esper.compare.comparison_run import ComparisonRun
from esper.config import ConfigError, TrainingConfig
from esper.data.task import Task
from esper.data.user_code import is_user_task, refuse_untrusted, same_task
from esper.files.policy import SavedPolicy, find_policy, policy_path
from esper.training.execution.ranks import RunRanks

TASK_SPECIFIC = ("n_envs", "episode_length", "blueprints")
"""Values of the section env that depend on the task, and are dropped for another one."""


def evaluate_controller(
    controller: str | SavedPolicy,
    folder: Path | str,
    task: Task | str | None = None,
    width: int | None = None,
    changes: Mapping[str, Any] | None = None,
    ranks: RunRanks | None = None,
    **more: Any,
) -> ComparisonRun:
    """Returns the comparison, saved in ``folder``, that evaluates ``controller`` on ``run.evaluation_pairs`` hosts.

    They are the held-out hosts of ``run.seed``, those that an agent's run with that seed ends with; no agent ever
    learned on them.

    Args:
        controller: a run folder, its checkpoint, a policy file, or ``pretrained``; or a custom controller, as
            ``path.py:function``.
        task: what hosts are trained on; None: the task that it learned on, ``digits`` for one's own controller. A
            user-defined task is code, and is never run just because a file names it: it has to be passed again.
        changes: config values, as nested tables, that replace those of its run.
        width, ranks, more: as of ``ComparisonRun``.

    Raises:
        ConfigError: the controller cannot be played on these hosts; the message says why.
    """
    if isinstance(controller, str) and not ControllerSpec.of(controller).is_code:
        controller = find_policy(controller)
    own_task = task if isinstance(task, Task) else None
    config = hosts_config(controller, task.name if isinstance(task, Task) else task, changes or {})
    arms = arms_of(controller, config)
    pairs = config.run.evaluation_pairs
    return ComparisonRun(arms, pairs, folder, task=own_task, width=width, ranks=ranks, **more)


def arms_of(controller: str | SavedPolicy, config: TrainingConfig) -> list[Arm]:
    """Returns hosts left alone, and the arms of a trained agent, or of a custom controller; see
    :func:`evaluate_controller`."""
    controllers = {ALONE: ALONE}
    if isinstance(controller, SavedPolicy):
        path = policy_path(controller.name)
        controllers["greedy"] = f"checkpoint:{path}"
        controllers["stochastic"] = f"sampled:{path}"
    else:
        controllers[controller] = controller
    arms = []
    for name, played in controllers.items():
        arms.append(Arm(name, played, config.with_values(run={"controller": played})))
    return arms


def hosts_config(controller: str | SavedPolicy, task: str | None, changes: Mapping[str, Any]) -> TrainingConfig:
    """Returns the config for the hosts: that of its run; for another task, with that task's sizes and rates.

    Without a trained agent, it is the default config. Raises ConfigError for a task that is code and is not named, and
    for a value that is invalid or has no effect.
    """
    check_effects(changes, UNREAD)
    if isinstance(controller, SavedPolicy):
        tables = _tables_of(controller, task)
    else:
        tables = {"task": {"name": task or TrainingConfig().task.name}}
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
