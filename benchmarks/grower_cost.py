"""The cost of a Grower: an epoch of a plain loop on `digits` with 0, 1 and 3 seeds, in units of the bare loop's epoch.

    python -m benchmarks.grower_cost --turns 40

For each number of seeds, three loops train the same host in turns: the bare loop, the loop with a Grower, and a bare
loop whose model has the same seeds as ordinary modules, which is the arithmetic without a Grower. Seeds are incubating
(straight through), then blended in. A validation by `grower.step` is printed in units of one validation of the bare
model. Ratios are medians over the turns, with the range of their middle half.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.grower_on_digits import PlainLoop, cnn
from esper.config import TrainingConfig
from esper.control.controller import EnvView, PerEnvController
from esper.data.digits import load
from esper.grower.env import LoopEnv
from esper.grower.grower import Grower
from esper.hosts.cnn import CNNHost
from esper.hosts.seed_hook import attach
from esper.lifecycle.stage import SeedStage
from esper.rollout.threads import one_thread
from esper.spaces.action import Op

BLUEPRINT, EPOCHS = "depthwise", 400
CONFIG = TrainingConfig().with_values(
    task={"name": "digits"},
    env={"one_incubating": False, "gates": {"trial_standard_errors": 1000.0}},
)


class Plants(PerEnvController):
    """Plants a seed in each of the first ``seeds`` slots, which then incubates or, if ``blended``, is blended in."""

    def __init__(self, env: LoopEnv, seeds: int, blended: bool) -> None:
        super().__init__(env.action_spec, env.layout, 1)
        self.slots = env.action_spec.slots[:seeds]
        self.last = (SeedStage.GERMINATED, SeedStage.TRAINING) if blended else (SeedStage.GERMINATED,)

    def choose(self, env: int, view: EnvView) -> NDArray[np.int64]:
        for slot in self.slots:
            if view.legal(Op.GERMINATE, slot, BLUEPRINT):
                return self.spec.encode(Op.GERMINATE, slot=slot, blueprint=BLUEPRINT, tempo=3)
            if view.stage(slot) in self.last and view.legal(Op.ADVANCE, slot):
                return self.spec.encode(Op.ADVANCE, slot=slot)
        return self.spec.encode(Op.WAIT)


def loop_of(host: CNNHost) -> PlainLoop:
    return PlainLoop(copy.deepcopy(host), CONFIG, EPOCHS, seed=0)


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def with_modules(host: CNNHost, grower: Grower) -> PlainLoop:
    """Returns a bare loop of a copy of the model that has the Grower's seeds as ordinary modules."""
    loop = loop_of(host)
    sites = grower.hooks.sites.items()
    attach(
        loop.host,
        {str(grower.hooks.paths[name]): (name, copy.deepcopy(site.seed), 0.5) for name, site in sites if site.seed},
    )
    loop.optimizer = torch.optim.SGD(loop.host.parameters(), 0.01, momentum=0.9)
    loop.scheduler = torch.optim.lr_scheduler.ConstantLR(loop.optimizer)
    return loop


def measure(seeds: int, blended: bool, turns: int) -> str:
    torch.manual_seed(0)
    host = cnn(load().build_host())
    bare, loop = loop_of(host), loop_of(host)
    grower = loop.grower(lambda env: Plants(env, seeds, blended), "ste", CONFIG)
    stages = ("BLENDING", "HOLDING") if blended else ("TRAINING",)
    while True:  # until all seeds are there
        loop.epoch()
        step = grower.step(loop.evaluate)
        if sum(slot.stage in stages for slot in step.slots.values()) == seeds and step.epoch > 3:
            break
    modules, ratios, floors, steps = with_modules(host, grower), [], [], []
    for _ in range(turns):
        plain = seconds(bare.epoch)
        floors.append(seconds(modules.epoch) / plain)
        ratios.append(seconds(loop.epoch) / plain)
        with torch.no_grad():
            validation = seconds(lambda: bare.evaluate(bare.host))
        steps.append(seconds(lambda: grower.step(loop.evaluate)) / validation)
    what = "blended" if blended else "incubating"
    return f"| {seeds} {what if seeds else ''} | {spread(ratios)} | {spread(floors)} | {spread(steps)} |"


def spread(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


@one_thread()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=40)
    turns = parser.parse_args().turns
    print("| seeds | epoch with a Grower | epoch with ordinary modules | grower.step, in validations |")
    print("|---|---|---|---|")
    for seeds, blended in ((0, False), (1, False), (3, False), (1, True), (3, True)):
        print(measure(seeds, blended, turns), flush=True)


if __name__ == "__main__":
    main()
