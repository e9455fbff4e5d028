"""Cases of `env-step`: the share of an epoch that is neither training nor validation of hosts."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from esper.bench.request import BenchArgs, Size, SizeForm
from esper.bench.runner import BenchCase
from esper.bench.sinks import TimedHub, full_telemetry
from esper.bench.synthetic import growth_env, image_task
from esper.bench.train_epoch import FULL
from esper.env.vector_env import GrowthVectorEnv
from esper.ppo.agent import PPOAgent
from esper.rollout.threads import one_thread

NAME = "env-step"
SIZE = SizeForm(("envs", "batch", "width"), "4x128x8")

DEFAULT_SIZES: tuple[Size, ...] = ((4, 128, 8),)
BUDGET = 5.0  # % of an epoch
HOSTS = ("stage", "train", "validate")
"""Phases that are work of the hosts."""


class Steps:
    """Steps of envs under an untrained agent, as in a run, with the share of the time in % that each part takes."""

    def __init__(self, env: GrowthVectorEnv, telemetry: TimedHub) -> None:
        self.env, self.telemetry = env, telemetry
        self.agent = PPOAgent(env.action_spec, env.layout, env.num_envs, env.config.ppo)
        self.shares: dict[str, list[float]] = {"policy": [], "telemetry": [], "rest": [], "all": []}
        self._begin()

    def _begin(self) -> None:
        self.observation, self.info = self.env.reset(seed=0)
        self.agent.begin()
        self.agent.buffer.clear()
        self.done = self.info["idle"]

    def step(self) -> float:
        """Performs one step of all envs and returns the share, in %, that was not the hosts'.

        If all episodes have ended, it first begins new ones.
        """
        if self.done.all():
            self._begin()
        hosts, sinks = self._hosts(), self.telemetry.seconds
        start = time.perf_counter()
        actions = self.agent.act(self.observation, self.info["action_mask"])
        acted = time.perf_counter() - start
        self.observation, rewards, terminated, truncated, self.info = self.env.step(actions)
        governed = self.info["reward_terms"]["governor"]
        self.agent.record(rewards, governed, terminated, truncated, self.info["idle"], self.observation)
        total = time.perf_counter() - start
        rest = total - (self._hosts() - hosts)
        self.done = terminated | truncated
        sinks = self.telemetry.seconds - sinks
        spent = {"policy": acted, "telemetry": sinks, "rest": rest - acted - sinks, "all": rest}
        for name, seconds in spent.items():
            self.shares[name].append(100 * seconds / total)
        return self.shares["all"][-1]

    def forget(self) -> None:
        """Discards the collected shares."""
        for shares in self.shares.values():
            shares.clear()

    def _hosts(self) -> float:
        return sum(self.env.phase_seconds.get(phase, 0.0) for phase in HOSTS)


def comparisons(request: BenchArgs) -> Iterator[BenchCase]:
    """Yields the whole share, which has a bar, then its parts from the same steps."""
    for device in request.devices:
        for size in request.sizes or DEFAULT_SIZES:
            yield from _at(size, device, request)


def _at(size: Size, device: torch.device, request: BenchArgs) -> Iterator[BenchCase]:
    envs, batch, width = size
    samples = batch if request.quick else max(1, FULL // batch) * batch
    validation = {"validation": batch} if request.quick else {}
    task = image_task(samples, width, device, **validation)
    with full_telemetry() as telemetry, growth_env(task, envs, batch, telemetry.emit) as env, one_thread():
        steps = Steps(env, telemetry)
        steps.step()  # warm-up
        steps.forget()

        def budget() -> float:
            return BUDGET

        label = f"E {envs}, batch {batch}, width {width}, {samples:,} samples"
        bar = 1.0 if size in DEFAULT_SIZES and not request.quick else None
        case = f"{NAME}: all but training and validation of hosts"
        yield BenchCase(case, label, device, f"a budget of {BUDGET:g} %", steps.step, budget, bar, unit="%")
        for part in ("policy", "telemetry", "rest"):
            shares = list(steps.shares[part])
            yield BenchCase(
                f"{NAME}: {part} only",
                label,
                device,
                "the same budget",
                shares.pop,
                budget,
                None,
                "%",
                None,
                len(shares),
            )
