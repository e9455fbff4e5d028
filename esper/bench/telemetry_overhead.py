"""Cases of `telemetry-overhead`: an episode with the telemetry of `esper run`, against the same one without it.

The task is digits, whose epochs are the shortest of all tasks, so that the overhead of events is largest. The task's
shipped schedule is played: seeds are planted, blended and kept, and every turn does the same work.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import torch

from esper.agents.controller import Controller
from esper.agents.make import controller_for
from esper.bench.case import BenchArgs, BenchCase, Sizes
from esper.bench.fixtures import flat_baseline, full_telemetry
from esper.config import TrainingConfig
from esper.env.make import EnvMaker
from esper.env.slot_env import SlotVectorEnv
from esper.env.vector_env import ignore
from esper.rollout.rollout import play_round
from esper.rollout.threads import one_thread
from esper.telemetry.event import Event
from esper.telemetry.span import Spans

NAME = "telemetry-overhead"
SIZES = Sizes(
    "ENVSxEPOCHS",
    ((8, 30),),
    quick=((2, 14),),
    seconds=125.0,
)

_BAR = 0.98  # time without telemetry / time with it
BUDGET = 2.0  # % of an episode


def comparisons(args: BenchArgs) -> Iterator[BenchCase]:
    """Yields the episode with telemetry against without, then the share of time in the sinks, which is less noisy."""
    for device, (envs, epochs) in SIZES.of(args):
        yield from _at(envs, epochs, device, args.quick)


def _at(envs: int, epochs: int, device: torch.device, quick: bool) -> Iterator[BenchCase]:
    config = TrainingConfig.parse(
        {
            "run": {"device": str(device), "controller": "schedule"},
            "task": {"samples_per_epoch": 64} if quick else {},
            "env": {"n_envs": envs, "episode_length": epochs},
        }
    )
    maker = EnvMaker.of(config)
    spans = Spans()
    shares: list[float] = []
    with ExitStack() as stack, one_thread():
        hub = stack.enter_context(full_telemetry())

        def emit(event: Event) -> None:
            with spans("telemetry"):
                hub.emit(event)

        def side(receive: Callable[[Event], None]) -> tuple[SlotVectorEnv, Controller]:
            env = maker.make(emit=receive)
            stack.callback(env.close)
            env.configure(baseline=flat_baseline(epochs))
            return env, controller_for("schedule", maker.config, env, run_seed=0)

        telling, telling_player = side(emit)
        silent, silent_player = side(ignore)

        def on() -> None:
            spans.seconds.clear()
            start = time.perf_counter()
            _play(telling, telling_player)
            shares.append(100 * spans.seconds["telemetry"] / (time.perf_counter() - start))

        episode = BenchCase(
            case=f"{NAME}: console, events.jsonl, metrics.csv",
            size=f"digits, E {envs}, {epochs} epochs",
            device=device,
            baseline="the same episode, telemetry off",
            run=on,
            run_baseline=partial(_play, silent, silent_player),
            bar=None if quick else _BAR,
        )
        yield episode
        yield replace(
            episode,
            case=f"{NAME}: share of time in sinks",
            baseline=f"a budget of {BUDGET:g} %",
            run=shares.pop,
            run_baseline=lambda: BUDGET,
            bar=None if quick else 1.0,
            unit="%",
            turns=len(shares),
        )


def _play(env: SlotVectorEnv, player: Controller) -> None:
    player.episode[:] = -1  # the same episode again
    play_round(env, player, seed=0)
