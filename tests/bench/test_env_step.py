"""Shares of a step's time in the case `env-step`."""

from __future__ import annotations

import pytest
import torch

from esper.bench import env_step
from esper.bench.fixtures import full_telemetry, growth_env, image_task
from esper.telemetry.event import Event

CPU = torch.device("cpu")


def test_the_parts_of_a_step_add_up() -> None:
    events: list[Event] = []
    with full_telemetry() as hub:

        def emit(event: Event) -> None:
            events.append(event)
            hub.emit(event)

        with growth_env(
            image_task(8, 2, CPU, validation=8), 2, 4, emit, horizon=3
        ) as env:
            steps = env_step.Steps(env)  # performs one step to warm up
            for _ in range(4):  # into the next episode
                everything = steps.step()
                assert 0 < everything < 100
                parts = {name: shares[-1] for name, shares in steps.shares.items()}
                assert sum(parts.values()) == pytest.approx(everything)
                assert min(parts.values()) > 0
            assert env.backend.each[0].epoch == 2
    assert len(events) >= 10
