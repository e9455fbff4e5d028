"""Cases of `telemetry-overhead`: an episode with the telemetry of `esper run`, against the same one without it.

The task is digits, whose epochs are the shortest of all tasks, so that the overhead of events is largest. The task's
shipped schedule is played: seeds are planted, blended and kept, and every turn does the same work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import torch

from esper.bench.request import BenchArgs, Size, SizeForm
from esper.bench.runner import BenchCase
from esper.bench.sinks import full_telemetry
from esper.bench.synthetic import flat_baseline
from esper.config import TrainingConfig
from esper.env.make import EnvMaker
from esper.env.vector_env import ignore
from esper.rollout.policies import controller_for
from esper.rollout.rollout import play_round
from esper.rollout.threads import one_thread
from esper.telemetry.event import Event

NAME = "telemetry-overhead"
SIZE = SizeForm(("envs", "epochs"), "8x30")

DEFAULT_SIZES: tuple[Size, ...] = ((8, 30),)
_QUICK_SIZES: tuple[Size, ...] = ((2, 14),)
_BAR = 0.98  # time without telemetry / time with it
BUDGET = 2.0  # % of an episode


def comparisons(request: BenchArgs) -> Iterator[BenchCase]:
    """Yields the episode with telemetry against without, then the share of time in the sinks, which is less noisy."""
    for device in request.devices:
        for size in request.sizes or (_QUICK_SIZES if request.quick else DEFAULT_SIZES):
            yield from _at(size, device, request.quick)


def _at(size: Size, device: torch.device, quick: bool) -> Iterator[BenchCase]:
    envs, epochs = size
    task = {"samples_per_epoch": 64} if quick else {}
    config = TrainingConfig.parse(
        {
            "run": {"device": str(device), "controller": "schedule"},
            "task": task,
            "env": {"n_envs": envs, "episode_length": epochs},
        }
    )
    maker = EnvMaker.of(config)
    with ExitStack() as stack, one_thread():
        telemetry = stack.enter_context(full_telemetry())

        def episode(emit: Callable[[Event], None]) -> Callable[[], None]:
            env = maker.make(emit=emit)
            stack.callback(env.close)
            env.baseline = flat_baseline(epochs)
            player = controller_for("schedule", maker.config, env, run_seed=0)

            def play() -> None:
                player.episode[:] = -1
                play_round(env, player, seed=0)

            return play

        measured: list[float] = []
        with_telemetry, off = episode(telemetry.emit), episode(ignore)

        def on() -> None:
            start, sinks = time.perf_counter(), telemetry.seconds
            with_telemetry()
            measured.append(100 * (telemetry.seconds - sinks) / (time.perf_counter() - start))

        label = f"digits, E {envs}, {epochs} epochs"
        full = "console, events.jsonl, metrics.csv"
        bar = None if quick else _BAR
        yield BenchCase(f"{NAME}: {full}", label, device, "the same episode, telemetry off", on, off, bar)
        shares = list(measured)
        yield BenchCase(
            f"{NAME}: share of time in sinks",
            label,
            device,
            f"a budget of {BUDGET:g} %",
            shares.pop,
            lambda: BUDGET,
            None if quick else 1.0,
            unit="%",
            turns=len(shares),
        )
