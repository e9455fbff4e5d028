"""The baseline; and an env that is saved between two steps and continued in another env gives the same bits."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from esper.agents.controller import RandomController
from esper.agents.heuristic import HeuristicController
from esper.config import TrainingConfig
from esper.core.action import Op
from esper.core.blueprints import BLUEPRINTS
from esper.data.task import Task
from esper.env.planted import PlantedVectorEnv
from esper.env.planted_law import SimParams
from esper.env.slot_env import SlotVectorEnv
from esper.env.vector_env import GrowthVectorEnv
from esper.hosts.graft import graft
from esper.hosts.host import Host
from esper.telemetry.event import (
    Event,
    GovernorRollback,
    StageChanged,
    StepsNotCaptured,
)
from esper.telemetry.record import stable_record
from tests.core_helpers import DAMAGE, EASY_GATES, flat_baseline
from tests.run.run_helpers import assert_same_bits, flat
from tests.selection import slow_except
from tests.training.growing import KINDS, Dropping, Kind, float_images

HORIZON, N_ENVS = 12, 2
BREAKS = 8
"""The step before which the host of env 1 is damaged."""


class Everything(nn.Module):
    """A user's network with BatchNorm, dropout of torch's and of the process's generators, and a buffer outside of its
    state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(4, 10)
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.norm(torch.relu(self.conv(x))))
        if self.training:
            self.seen = self.seen + h.detach().mean()
        return self.head(
            functional.dropout(h.mean(dim=(2, 3)), 0.1, self.training)
            + 1e-3 * self.seen
        )  # type: ignore[no-any-return]


def _everything() -> Host:
    return graft(Everything(), {"r0c0": "conv", "r0c1": "norm"})


def users() -> Task:
    return replace(float_images(), build_host=_everything)


WORLDS: dict[str, Kind] = {
    **KINDS,
    "float16": Kind(float_images, precision="float16"),
    "a user's model": Kind(users),
    "cut short": Kind(float_images),
}


def world(name: str, events: list[Event]) -> SlotVectorEnv:
    sizes = {
        "n_envs": N_ENVS,
        "episode_length": HORIZON,
        "gates": EASY_GATES,
        "embargo": 1,
    }
    if "cut short" in name:
        sizes |= {
            "stop_on": ["divergence", "plateau"],
            "plateau_epochs": 2,
            "plateau_margin": 50.0,
        }
    if name.startswith("planted"):
        config = TrainingConfig.parse({"env": sizes, "task": {"name": "planted"}})
        return PlantedVectorEnv(config, SimParams(noise=1.0, paired_noise=1.0))
    kind = WORLDS[name]
    config = TrainingConfig.parse(
        {
            "run": {"lanes": 2},
            "task": {
                "samples_per_epoch": 48,
                "batch_size": 16,
                "micro_batches": kind.micro_batches,
                "precision": kind.precision,
                "learning_rate": 0.05,
            },
            "env": {
                **sizes,
                "incubation": kind.incubation,
            },
            "governor": {"snapshot_every": 2},
        }
    )

    def emit(event: Event) -> None:
        if not isinstance(
            event, StepsNotCaptured
        ):  # each process says once why it leaves seeds to PyTorch
            events.append(event)

    registry = BLUEPRINTS.copy()
    registry.register("cnn", "dropping", parameters=lambda c: 2 * c)(Dropping)
    return GrowthVectorEnv(
        kind.task(),
        config,
        emit=emit,
        baseline=flat_baseline(HORIZON),
        blueprints=registry,
    )


class Course:
    """An env under random actions, with a host that breaks."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.events: list[Event] = []
        self.env = world(name, self.events)
        self.chance = RandomController(self.env.action_spec, self.env.layout, N_ENVS, 5)
        self.step_number = 0

    def begin(self, episode: int) -> None:
        self.env.run_seed, self.step_number = 11, 0
        self.env.state.episode[:] = episode - 1
        self.chance.episode[:] = episode - 1
        self.observation, self.info = self.env.reset()
        self.chance.begin()

    def step(self) -> list[Any]:
        """All that is visible outside, and all state inside."""
        if self.step_number == BREAKS and isinstance(self.env, GrowthVectorEnv):
            DAMAGE["NaN weight"](self.env.training[1])
        masks = {name: mask.copy() for name, mask in self.info["action_mask"].items()}
        if self.step_number % 5 != 4:
            masks["op"][:, Op.PRUNE] = (
                False  # pure chance removes seeds before they get anywhere
            )
        if "cut short" in self.name:
            masks["op"][1, Op.GERMINATE] = (
                False  # a host with a living seed is on no plateau
            )
        actions = self.chance.act(self.observation, masks)
        self.observation, rewards, terminated, truncated, self.info = self.env.step(
            actions
        )
        self.step_number += 1
        return [
            self.observation,
            rewards,
            terminated,
            truncated,
            *_leaves(self.info),
            *self.inside(),
        ]

    def inside(self) -> list[Any]:
        return sorted(flat(self.env.state_dict()).items())

    def taken_away(self) -> dict[str, Any]:
        return saved_and_read(
            {
                "env": self.env.state_dict(),
                "chance": self.chance.memory_state(),
                "number": self.step_number,
            }
        )

    def go_on_from(self, state: dict[str, Any]) -> None:
        self.observation, self.info = self.env.load_state_dict(state["env"])
        self.chance.load_memory_state(state["chance"])
        self.step_number = state["number"]


def saved_and_read(state: dict[str, Any]) -> Any:
    """Returns the state as read from a file without running code."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def _leaves(info: dict[str, Any]) -> list[NDArray[Any]]:
    return [
        leaf
        for value in info.values()
        for leaf in (value.values() if isinstance(value, dict) else (value,))
    ]


def taken_up(name: str, count: int) -> range:
    """States to continue from: all of them if hosts are simulated; else two, before and after the host breaks."""
    return range(count) if name == "planted" else range(6, count, 5)


@pytest.mark.trap(30)
@pytest.mark.parametrize(
    "name",
    slow_except(
        ["float images", "planted, cut short"],
        [*WORLDS, "planted", "planted, cut short"],
    ),
)
def test_an_env_resumes_to_the_last_bit_from_any_step(name: str) -> None:
    """The other env is new, or has played other episodes.

    Hosts, seeds, momentum, snapshots, generators and clocks are restored. On the way seeds are planted and removed, and
    a host is rolled back.
    """
    first = Course(name)
    first.begin(4)
    states, observed, steps, marks = (
        [first.taken_away()],
        [first.observation],
        [],
        [len(first.events)],
    )
    while not first.env.done.all():
        steps.append(first.step())
        states.append(first.taken_away())
        observed.append(first.observation)
        marks.append(len(first.events))
    told = [stable_record(event) for event in first.events]
    simulated = name.startswith("planted")
    assert first.env.state.truncated.any() == ("cut short" in name)
    if name in KINDS:
        assert any(isinstance(event, GovernorRollback) for event in first.events)
        assert {"TRAINING", "BLENDING", "HOLDING"} <= {
            e.after for e in first.events if isinstance(e, StageChanged)
        }
    used = Course(name)
    used.begin(0)
    used.step()
    for turn, number in enumerate(taken_up(name, len(states))):
        other = used if turn % 2 else Course(name)
        heard = len(other.events)
        other.go_on_from(states[number])
        if turn % 2 == 0 and not simulated:
            heard += 1  # the baseline, which every env reports once
        np.testing.assert_array_equal(other.observation, observed[number])
        for expected in steps[number:]:
            assert_same_bits(other.step(), expected)
        assert [stable_record(event) for event in other.events[heard:]] == told[
            marks[number] :
        ]
        if other is not used:
            other.env.close()
    first.env.close()
    used.env.close()


def test_a_state_of_another_host_is_refused() -> None:
    one, other = Course("float images"), Course("text")
    one.begin(0)
    with pytest.raises((KeyError, ValueError)):
        other.go_on_from(one.taken_away())
    for course in (one, other):
        course.env.close()


def test_a_saved_state_does_not_change_with_the_env() -> None:
    course = Course("float images")
    course.begin(0)
    state = course.env.state_dict()
    before = flat(saved_and_read(state))
    for _ in range(3):
        course.step()
    assert flat(state) == before
    course.env.close()


@pytest.mark.parametrize("make", [RandomController, HeuristicController])
def test_a_resumed_controller_keeps_its_memory(make: Callable[..., Any]) -> None:
    actions = []
    for cut in (None, 4):
        env = world("planted", [])
        player = make(env.action_spec, env.layout, N_ENVS, 5)
        observation, info = env.reset(seed=2)
        player.begin()
        rows = []
        for step in range(HORIZON):
            if step == cut:
                memory = saved_and_read(player.memory_state())
                player = make(env.action_spec, env.layout, N_ENVS, 5)
                player.load_memory_state(memory)
            rows.append(player.act(observation, info["action_mask"]))
            observation, _, _, _, info = env.step(rows[-1])
        actions.append(np.array(rows))
    np.testing.assert_array_equal(*actions)
