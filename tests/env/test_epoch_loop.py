"""The phases of an env's steps, and the time of sinks, which counts as telemetry only."""

from __future__ import annotations

import numpy as np
import pytest
from torch.profiler import ProfilerActivity, profile

from esper.core.action import Op
from esper.env.vector_env import GrowthVectorEnv
from esper.telemetry.event import Event
from tests.core_helpers import digits, flat_baseline, rig, tiny_config, wait_actions
from tests.training.test_host_trainer import streamed

STEP = {"train", "validate", "govern", "decide", "telemetry"}


def test_a_step_spends_its_time_in_these_phases() -> None:
    with rig() as world:
        assert set(world.env.phase_seconds) == {"validate", "telemetry"}  # of the reset
        world.step()
        seconds = world.env.phase_seconds
        assert set(seconds) == STEP
        assert all(value > 0 for value in seconds.values())
        world.step()
        assert all(
            world.env.phase_seconds[name] > value for name, value in seconds.items()
        )


def test_the_time_of_events_is_in_no_other_phase(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only the receiver of events moves the clock; events come from several phases."""
    now, got = [0.0], list[Event]()
    monkeypatch.setattr("esper.telemetry.span.perf_counter", lambda: now[0])

    def receive(event: Event) -> None:
        now[0] += 1.0
        got.append(event)

    env = GrowthVectorEnv(
        digits(), tiny_config(2, 2), emit=receive, baseline=flat_baseline(2)
    )
    try:
        env.reset(seed=0)
        actions = wait_actions(2)
        actions[0] = env.action_spec.encode(Op.GERMINATE, "r0c0", "norm")
        env.step(actions)
        env.step(wait_actions(2))
    finally:
        env.close()
    assert len({type(event).__name__ for event in got}) >= 4
    assert env.phase_seconds == {
        **dict.fromkeys(STEP, 0.0),
        "telemetry": float(len(got)),
    }


def test_streamed_data_is_waited_for_in_a_phase_of_its_own() -> None:
    env = GrowthVectorEnv(streamed(0), tiny_config(2, 2), baseline=flat_baseline(2))
    try:
        env.reset(seed=0)
        env.step(np.zeros((2, 8), dtype=np.int64))
        assert set(env.phase_seconds) == {*STEP, "stage"}
    finally:
        env.close()


@pytest.mark.parametrize("marked", [True, False])
def test_the_config_puts_the_phases_into_traces(marked: bool) -> None:
    with (
        rig(
            run={"lanes": 1}, telemetry={"level": "debug" if marked else "normal"}
        ) as world,
        profile(activities=[ProfilerActivity.CPU]) as trace,
    ):
        world.step()
    named = {event.name for event in trace.events() if event.name.startswith("esper/")}
    assert named == ({f"esper/{name}" for name in STEP} if marked else set())
