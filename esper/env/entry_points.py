"""Entry points of ``gymnasium.make`` and ``gymnasium.make_vec`` for ``esper/Growth-v0``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gymnasium.vector import AutoresetMode

from esper.config import ConfigError, EnvConfig, TaskConfig, TrainingConfig
from esper.env.make import make_env
from esper.env.single import SingleEnv
from esper.env.slot_env import SlotVectorEnv

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

    It takes the keywords of :func:`make_vector` except ``num_envs`` and ``autoreset_mode``, which raise TypeError.
    """
    if refused := {"num_envs", "autoreset_mode"} & set(keywords):
        raise TypeError(f"{', '.join(sorted(refused))}: not available for one env; use gymnasium.make_vec for many")
    return SingleEnv(make_vector(1, autoreset_mode=AutoresetMode.DISABLED, **keywords))


def _configured(
    num_envs: int, task: str | None, config: TrainingConfig | Mapping[str, Any] | None, keywords: Mapping[str, Any]
) -> TrainingConfig:
    base = config if isinstance(config, TrainingConfig) else TrainingConfig.parse(dict(config or {}))
    if base.env.n_envs not in (None, num_envs):
        raise ConfigError(f"num_envs is {num_envs}, but env.n_envs of the config is {base.env.n_envs}; omit the latter")
    tables: dict[str, dict[str, Any]] = {name: {} for name in TrainingConfig.model_fields}
    for name, value in keywords.items():
        if name in PLAIN:
            tables[PLAIN[name]][name] = value
        elif name not in tables:
            own = ["num_envs", "task", "config", "autoreset_mode"]
            known = ", ".join([*own, *(section for section in tables if section != "task"), *sorted(PLAIN)])
            raise TypeError(f"got an unexpected keyword argument {name!r}; known: {known}")
        elif not isinstance(value, Mapping):
            raise TypeError(f"{name} must be a dict of values of that section of the config, not {value!r}")
        else:
            tables[name] |= value
    tables["env"]["n_envs"] = num_envs
    if task is not None:
        tables["task"]["name"] = task
    return base.with_values(**tables)
