"""Small envs for tests: a task loaded once, tiny configs, and actions by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.config import TrainingConfig
from esper.core.action import HEADS, Op
from esper.core.blend import Seed
from esper.core.blueprints import BLUEPRINTS, BlueprintRegistry
from esper.core.ramps import STYLES
from esper.core.site import Role, Site
from esper.core.slots import MEASUREMENTS
from esper.core.stage import SeedStage
from esper.core.state import Baseline
from esper.data.task import Task, resolve
from esper.data.tasks import load_task
from esper.env.slot_env import SlotVectorEnv
from esper.env.training_backend import EnvHost
from esper.env.vector_env import GrowthVectorEnv
from esper.hosts.cnn import CNNHost
from esper.telemetry.event import Event
from esper.training.host_training import HostTraining
from esper.training.metrics import make_metrics
from esper.training.step import train_epoch

Actions = Mapping[int, NDArray[np.int64]]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Hosts train with one intra-op thread, as they do in a worker: the same bits whatever the machine, and no waiting.

    A folder whose conftest imports this fixture has it for all its tests.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


EASY_GATES: dict[str, Any] = {
    "min_training_epochs": 1,
    "min_gradient_health": 0.0,
    "trial_standard_errors": 1000.0,
}
"""G2 that any finite seed passes after one epoch, so that tests reach late stages in few epochs."""


@cache
def digits() -> Task:
    """The task with a pool after both blocks, and so a second row of slots behind each, trained at a modest rate."""
    host = partial(CNNHost, 1, 10, base=3, blocks=2, rows=2)
    return replace(
        load_task("digits"),
        build_host=host,
        slots=None,
        at_once=False,
        learning_rate=0.05,
        warmup_epochs=0.0,
        weight_decay=5e-4,
        label_smoothing=0.0,
    )


def flat_baseline(horizon: int, accuracy: float = 10.0, loss: float = 2.3) -> Baseline:
    return Baseline((accuracy,) * (horizon + 1), (loss,) * (horizon + 1), 0.1, 1)


def tiny_config(
    n_envs: int = 1, horizon: int = 8, **sections: dict[str, Any]
) -> TrainingConfig:
    """64 samples in batches of 32, one worker, gates that open."""
    tables: dict[str, dict[str, Any]] = {
        "run": {"lanes": 1},
        "task": {"samples_per_epoch": 64, "batch_size": 32},
        "env": {
            "n_envs": n_envs,
            "episode_length": horizon,
            "baseline_episodes": 1,
            "gates": EASY_GATES,
        },
    }
    for name, values in sections.items():
        tables[name] = {**tables.get(name, {}), **values}
    return TrainingConfig.parse(tables)


class SlotView:
    """One slot of one env as an object: the fields of its arrays, read on each access, and the site's module."""

    def __init__(self, env: SlotVectorEnv, name: str, index: int = 0) -> None:
        self.env, self.name, self.place = (
            env,
            name,
            (index, env.action_spec.slots.index(name)),
        )

    def __getattr__(self, field: str) -> Any:
        """A measurement that was not made is None."""
        value = getattr(self.env.state.slots, field)[self.place].item()
        return None if value != value else value

    @property
    def stage(self) -> SeedStage:
        return SeedStage(self.env.state.slots.stage[self.place])

    @property
    def measured(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in MEASUREMENTS}

    @property
    def blended(self) -> bool:
        return bool(self.env.state.slots.alpha_on[self.place] > 0)

    @property
    def site(self) -> Site:
        assert isinstance(self.env, GrowthVectorEnv)
        return self.env.training[self.place[0]].site_by_name[self.name]

    @property
    def seed(self) -> Seed | None:
        return self.site.seed

    @property
    def finite(self) -> Tensor | None:
        return None if self.site.planted is None else self.site.planted.finite


class Rig:
    """An env with all its events, and actions by name."""

    def __init__(
        self, config: TrainingConfig, blueprints: BlueprintRegistry | None = None
    ) -> None:
        self.events: list[Event] = []
        horizon = config.env.episode_length
        assert horizon is not None
        self.env = GrowthVectorEnv(
            digits(),
            config,
            emit=self.events.append,
            baseline=flat_baseline(horizon),
            blueprints=blueprints,
        )
        self.reset(seed=config.run.seed)

    def reset(self, **arguments: Any) -> None:
        self.observation, self.info = self.env.reset(**arguments)

    def action(
        self,
        op: str,
        slot: str | None = None,
        blueprint: str | None = None,
        **heads: Any,
    ) -> NDArray[np.int64]:
        return self.env.action_spec.encode(Op[op], slot, blueprint, **heads)

    def step(self, actions: Actions | None = None) -> None:
        """One step; envs without an action WAIT. Results are kept as attributes."""
        rows = np.zeros((self.env.num_envs, 8), dtype=np.int64)
        for index, row in (actions or {}).items():
            rows[index] = row
        self.observation, self.rewards, self.terminated, self.truncated, self.info = (
            self.env.step(rows)
        )

    def do(
        self,
        op: str,
        slot: str | None = None,
        blueprint: str | None = None,
        env: int = 0,
        **heads: Any,
    ) -> None:
        self.step({env: self.action(op, slot, blueprint, **heads)})

    def host(self, index: int = 0) -> EnvHost:
        return self.env.backend.hosts[index]

    def training(self, index: int = 0) -> HostTraining:
        return self.env.training[index]

    def slot(self, name: str, index: int = 0) -> SlotView:
        return SlotView(self.env, name, index)

    def measurement(self, index: int = 0) -> SimpleNamespace:
        """The measurements of one env as they are now."""
        names = (
            "loss",
            "accuracy",
            "committed",
            "all_off",
            "committed_loss",
            "all_off_loss",
            "train_loss",
        )
        return SimpleNamespace(
            **{name: float(getattr(self.env.state, name)[index]) for name in names}
        )

    def value(self, name: str, index: int = 0) -> float:
        return float(self.env.layout.read(self.observation[index], name))

    def of_kind(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def grow(
        self,
        slot: str,
        stage: SeedStage,
        blueprint: str = "conv_light",
        env: int = 0,
        style: str = "LINEAR_ADD",
    ) -> None:
        """Brings an empty slot to ``stage`` by legal actions, with a tempo of 3: 1, 2, 3, 5 and 6 steps."""
        self.do("GERMINATE", slot, blueprint, env, tempo=3, style=style)
        path = [
            SeedStage.TRAINING,
            SeedStage.BLENDING,
            SeedStage.HOLDING,
            SeedStage.FOSSILIZED,
        ]
        for after in path[: path.index(stage) + 1] if stage in path else []:
            if after is SeedStage.HOLDING:
                self.step()  # the ramp ends: 1/3 and 2/3 were taken on entering
            self.do(
                "FOSSILIZE" if after is SeedStage.FOSSILIZED else "ADVANCE",
                slot,
                env=env,
            )
        assert self.slot(slot, env).stage is stage, self.slot(slot, env).stage


@contextmanager
def rig(
    n_envs: int = 1,
    horizon: int = 8,
    blueprints: BlueprintRegistry | None = None,
    **sections: dict[str, Any],
) -> Iterator[Rig]:
    made = Rig(tiny_config(n_envs, horizon, **sections), blueprints)
    try:
        yield made
    finally:
        made.env.close()


def make_training(
    config: TrainingConfig | None = None, index: int = 0, seed: int = 0
) -> HostTraining:
    """One host in training, reset, without an env around it."""
    task = digits()
    training = HostTraining(
        index,
        task,
        resolve(config or tiny_config(), task),
        make_metrics(1, torch.device("cpu"))[0],
    )
    training.reset(seed, 0)
    return training


ROLES = {
    SeedStage.GERMINATED: Role.ABSENT,
    SeedStage.TRAINING: Role.INCUBATING,
    SeedStage.BLENDING: Role.BLENDED,
    SeedStage.HOLDING: Role.BLENDED,
    SeedStage.FOSSILIZED: Role.FOSSIL,
}


def plant(
    training: HostTraining,
    name: str,
    blueprint: str = "conv_light",
    style: str = "LINEAR_ADD",
    stage: SeedStage = SeedStage.TRAINING,
    target: float = 1.0,
    registry: BlueprintRegistry = BLUEPRINTS,
) -> Site:
    """A seed with the role that it has at ``stage``; blended at full ``target`` from BLENDING on."""
    site = training.site_by_name[name]
    training.plant(
        site, registry.at(training.host.topology, site.place, blueprint), STYLES[style]
    )
    alpha = target if ROLES[stage] in (Role.BLENDED, Role.FOSSIL) else 0.0
    training.assign(
        site, ROLES[stage], alpha, target, learning=ROLES[stage] is not Role.ABSENT
    )
    return site


def plant_in(
    env: GrowthVectorEnv,
    name: str,
    blueprint: str = "conv_light",
    style: str = "LINEAR_ADD",
    stage: SeedStage = SeedStage.TRAINING,
    target: float = 1.0,
    index: int = 0,
) -> Site:
    """Plants as :func:`plant`, and writes the seed into the arrays of the env."""
    slots, spec = env.state.slots, env.action_spec
    site = plant(
        env.training[index], name, blueprint, style, stage, target, env.blueprints
    )
    place = (index, spec.slots.index(name))
    slots.stage[place], slots.blueprint[place] = stage, spec.blueprints.index(blueprint)
    slots.style[place], slots.parameters[place] = (
        list(STYLES).index(style),
        site.parameters,
    )
    slots.alpha[place] = slots.alpha_target[place] = site.alpha
    slots.incubation_target[place] = target
    return site


def unmeasured_fossils(training: HostTraining) -> dict[str, dict[str, float]]:
    """The fossils that a snapshot is to hold, without measurements."""
    return {name: {} for name in training.fossils()}


def train(training: HostTraining, epochs: int = 1) -> None:
    for _ in range(epochs):
        train_epoch(training)


def tensors_of(
    training: HostTraining, seeds: tuple[str, ...] = ()
) -> dict[str, Tensor]:
    """Copies of host parameters, buffers and momentum, and of those of the seeds in the named slots."""
    found = {
        f"host.{name}": tensor for name, tensor in training.host.state_dict().items()
    }
    for slot in seeds:
        seed = training.site_by_name[slot].seed
        assert seed is not None
        found |= {f"{slot}.{name}": buffer for name, buffer in seed.named_buffers()}
    groups = [training.host_group, *(training.seed_groups[name] for name in seeds)]
    for group in groups:
        for i, parameter in enumerate(group.parameters):
            found[f"{group.name}.parameter.{i}"] = parameter.detach()
            momentum = group.optimizer.state.get(parameter, {}).get("momentum_buffer")
            if momentum is not None:
                found[f"{group.name}.momentum.{i}"] = momentum
    return {name: tensor.clone() for name, tensor in found.items()}


def same_bits(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def all_finite(training: HostTraining) -> bool:
    return all(
        bool(torch.isfinite(tensor).all()) for tensor in tensors_of(training).values()
    )


def _fill_first_weight(value: float) -> Callable[[HostTraining], None]:
    def damage(training: HostTraining) -> None:
        with torch.no_grad():
            next(training.host.parameters()).flatten()[0] = value

    return damage


def _break_running_mean(training: HostTraining) -> None:
    mean = next(
        buffer
        for name, buffer in training.host.named_buffers()
        if name.endswith("running_mean")
    )
    mean[0] = float("nan")


def _break_momentum(training: HostTraining) -> None:
    state = next(iter(training.host_group.optimizer.state.values()))
    state["momentum_buffer"].fill_(float("inf"))


DAMAGE: dict[str, Callable[[HostTraining], None]] = {
    "NaN weight": _fill_first_weight(float("nan")),
    "infinite weight": _fill_first_weight(float("inf")),
    "NaN running mean": _break_running_mean,
    "infinite momentum": _break_momentum,
}
"""Ways to break a host, each of which the governor sees in the next epoch."""


def wait_actions(n_envs: int) -> NDArray[np.int64]:
    """WAIT for every env, int64 [E, 8]."""
    return np.full((n_envs, len(HEADS)), Op.WAIT, dtype=np.int64)
