"""The cost of a Grower: an epoch of a plain loop with 0, 1 and 3 seeds, in units of the bare loop's epoch.

    python -m benchmarks.grower_cost --network digits --turns 40
    python -m benchmarks.grower_cost --network resnet18 --turns 20
    python -m benchmarks.grower_cost --network gpt2 --turns 20
    python -m benchmarks.grower_cost --network mlp --turns 40 --merged

For each number of seeds, three loops train the same network in turns: the bare loop, the loop with a Grower, and a bare
loop whose model has the same seeds as ordinary modules, which is the arithmetic without a Grower. Seeds are incubating
(straight through), then blended in. A validation by `grower.step` is printed in units of one validation of the bare
model. Ratios are medians over the turns, with the range of their middle half.

With `--merged`, layers grow by a half and the seeds are merged; a bare loop then trains an ordinary network of these
widths. The Grower has three sites of each kind, all of them vacant again.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.grower_on_digits import cnn, inputs_of
from esper.agents.controller import EnvView, PerEnvController
from esper.config import TrainingConfig
from esper.core.action import Op
from esper.core.stage import SeedStage
from esper.data.digits import load
from esper.grower.env import LoopEnv
from esper.grower.grower import Grower
from esper.hosts.seed_hook import attach
from esper.hosts.widen import resize, shapes_of
from esper.hosts.zoo import import_torchvision
from esper.run.rollout import one_thread

EPOCHS = 400
GATES = {
    "min_training_epochs": 1,
    "min_gradient_health": 0.0,
    "trial_standard_errors": 1000.0,
}
"""Gates that let every seed through."""
CONFIG = TrainingConfig().with_values(env={"one_incubating": False, "gates": GATES})

Batch = tuple[Tensor, Tensor]


@dataclass
class Network:
    """A network with what its loop needs."""

    model: nn.Module
    batches: list[Batch]
    """Those of one epoch."""
    logits: Callable[[nn.Module, Tensor], Tensor]
    """Computes logits [rows, classes] of the inputs of a batch."""
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    sites: dict[str, str]
    """Three sites by slot name."""
    blueprint: str
    widenings: dict[str, str]
    """Sites at which layers can be wider, by slot name."""


def in_batches(x: Tensor, y: Tensor, rows: int) -> list[Batch]:
    return [
        (x[start : start + rows], y[start : start + rows])
        for start in range(0, len(x), rows)
    ]


def digits() -> Network:
    """Returns the host of the task `digits`, 277 parameters, and the task's training data in batches of 128."""
    task = load()
    host = cnn(task.build_host())
    x, y = inputs_of(task.train)  # type: ignore[arg-type]
    sites = {site.name: str(i) for i, site in enumerate(host.sites)}
    return Network(
        model=nn.Sequential(*host.segments),
        batches=in_batches(x, y, 128),
        logits=lambda model, rows: model(rows),
        optimizer=partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
        sites=sites,
        blueprint="depthwise",
        widenings={"r2c0": "0.0 -> 2.0", "r2c1": "2.0 -> 3.2"},
    )


def mlp() -> Network:
    """Returns an MLP for the task `digits`, 3,466 parameters, and the task's training data in batches of 128."""
    x, y = inputs_of(load().train)  # type: ignore[arg-type]
    layers = [nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU()]
    return Network(
        model=nn.Sequential(*layers, nn.Linear(32, 10)),
        batches=in_batches(x, y, 128),
        logits=lambda model, rows: model(rows),
        optimizer=partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
        sites={"r0c0": "1", "r0c1": "3"},
        blueprint="mlp_small",
        widenings={"r2c0": "1 -> 3", "r2c1": "3 -> 5"},
    )


def resnet18() -> Network:
    """Returns torchvision's ResNet-18 for images of 64x64, 11 M parameters, and 3 batches of 32 random ones."""
    models = import_torchvision("torchvision.models")
    images = torch.randn(96, 3, 64, 64)
    classes = torch.randint(10, (96,))
    return Network(
        model=models.resnet18(num_classes=10),
        batches=in_batches(images, classes, 32),
        logits=lambda model, rows: model(rows),
        optimizer=partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
        sites={"r0c0": "layer1", "r1c0": "layer2", "r2c0": "layer3"},
        blueprint="depthwise",
        widenings={
            f"r3c{i - 1}": f"layer{i}.0.conv1 -> layer{i}.0.conv2" for i in (1, 2, 3)
        },
    )


def gpt2() -> Network:
    """Returns a GPT-2 of 4 layers and width 256, 3.2 M parameters, and 3 batches of 8 random texts of 128 tokens."""
    import_torchvision()  # transformers imports it
    import transformers

    shape = transformers.GPT2Config(
        vocab_size=256,
        n_positions=128,
        n_embd=256,
        n_layer=4,
        n_head=4,
        bos_token_id=None,
        eos_token_id=None,
    )
    texts = torch.randint(256, (24, 129))
    return Network(
        model=transformers.GPT2LMHeadModel(shape),
        batches=[
            (part[:, :-1], part[:, 1:].flatten())
            for part, _ in in_batches(texts, texts, 8)
        ],
        logits=lambda model, rows: model(rows).logits.flatten(0, 1),
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        sites={
            "r0c0": "transformer.h.0",
            "r1c0": "transformer.h.1",
            "r2c0": "transformer.h.2",
        },
        blueprint="lora",
        widenings={
            f"r3c{i}": f"transformer.h.{i}.mlp.c_fc -> transformer.h.{i}.mlp.c_proj"
            for i in range(3)
        },
    )


NETWORKS = {"digits": digits, "mlp": mlp, "resnet18": resnet18, "gpt2": gpt2}


class Loop:
    """A plain loop with clipping that trains a copy of a network."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.model = copy.deepcopy(network.model)
        self.optimizer = network.optimizer(self.model.parameters())

    def epoch(self) -> None:
        self.model.train()
        for rows, targets in self.network.batches:
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(
                self.network.logits(self.model, rows), targets
            )
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()

    def evaluate(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        """Returns which rows of the first batch ``model`` gets right, as 0 and 1, and its loss there."""
        model.eval()
        rows, targets = self.network.batches[0]
        logits = self.network.logits(model, rows)
        return (logits.argmax(1) == targets).double(), nn.functional.cross_entropy(
            logits, targets
        )


class Plants(PerEnvController):
    """Plants a seed in each of the first ``seeds`` slots, which then incubates or, if ``blended``, is blended in."""

    def __init__(self, env: LoopEnv, blueprint: str, seeds: int, blended: bool) -> None:
        super().__init__(env.action_spec, env.layout, 1)
        self.blueprint = blueprint
        self.slots = env.action_spec.slots[:seeds]
        self.last = (
            (SeedStage.GERMINATED, SeedStage.TRAINING)
            if blended
            else (SeedStage.GERMINATED,)
        )

    def choose(self, env: int, view: EnvView) -> NDArray[np.int64]:
        for slot in self.slots:
            if view.legal(Op.GERMINATE, slot, self.blueprint):
                return self.spec.encode(
                    Op.GERMINATE, slot=slot, blueprint=self.blueprint, tempo=3
                )
            if view.stage(slot) in self.last and view.legal(Op.ADVANCE, slot):
                return self.spec.encode(Op.ADVANCE, slot=slot)
        return self.spec.encode(Op.WAIT)


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def with_modules(network: Network, grower: Grower) -> Loop:
    """Returns a bare loop whose model has the Grower's seeds as ordinary modules."""
    loop = Loop(network)
    seeds = {}
    for name, site in grower.hooks.sites.items():
        if site.seed is not None:
            seeds[str(grower.hooks.paths[name])] = (name, copy.deepcopy(site.seed), 0.5)
    attach(loop.model, seeds)
    loop.optimizer = network.optimizer(loop.model.parameters())
    return loop


def measure(network: Network, seeds: int, blended: bool, turns: int) -> str:
    """Returns a row of the table."""
    bare = Loop(network)
    loop = Loop(network)
    grower = Grower(
        loop.model,
        network.sites,
        loop.optimizer,
        lambda env: Plants(env, network.blueprint, seeds, blended),
        EPOCHS,
        config=CONFIG,
    )
    stages = ("BLENDING", "HOLDING") if blended else ("TRAINING",)
    while True:  # until all seeds are there
        loop.epoch()
        step = grower.step(loop.evaluate)
        if (
            sum(slot.stage in stages for slot in step.slots.values()) == seeds
            and step.epoch > 3
        ):
            break
    modules = with_modules(network, grower)
    ratios = []
    floors = []
    steps = []
    for _ in range(turns):
        plain = seconds(bare.epoch)
        floors.append(seconds(modules.epoch) / plain)
        ratios.append(seconds(loop.epoch) / plain)
        with torch.no_grad():
            validation = seconds(lambda: bare.evaluate(bare.model))
        steps.append(seconds(lambda: grower.step(loop.evaluate)) / validation)
    above = [ratio / floor for ratio, floor in zip(ratios, floors, strict=True)]
    what = "blended" if blended else "incubating"
    row = (
        f"{seeds} {what if seeds else ''}",
        spread(ratios),
        spread(floors),
        spread(above),
        spread(steps),
    )
    return f"| {' | '.join(row)} |"


class Widens(PerEnvController):
    """Plants a widening in each of these slots."""

    def __init__(self, env: LoopEnv, slots: Iterable[str]) -> None:
        super().__init__(env.action_spec, env.layout, 1)
        self.waiting = list(slots)

    def choose(self, env: int, view: EnvView) -> NDArray[np.int64]:
        if not self.waiting:
            return self.spec.encode(Op.WAIT)
        slot = self.waiting.pop()
        return self.spec.encode(Op.GERMINATE, slot=slot, blueprint="widen_half")


def measure_merged(network: Network, turns: int) -> str:
    """Returns a row of the table of merged networks."""
    loop = Loop(network)
    grower = Grower(
        loop.model,
        {**network.sites, **network.widenings},
        loop.optimizer,
        lambda env: Widens(env, network.widenings),
        EPOCHS,
        merge=True,
    )
    for _ in range(3):
        loop.epoch()
        grower.step(loop.evaluate)
    if grower.merged.keys() != network.widenings.keys():
        raise RuntimeError(f"only {grower.merged} were merged")
    bare = Loop(network)
    resize(bare.model, shapes_of(loop.model))
    bare.model.load_state_dict(loop.model.state_dict())
    bare.optimizer = network.optimizer(bare.model.parameters())
    for each in (loop, bare):
        each.epoch()
    ratios = []
    for turn in range(turns):
        times = {}
        # Whichever comes first does so in every other turn.
        for name, each in sorted(
            {"bare": bare, "loop": loop}.items(), reverse=turn % 2 == 1
        ):
            times[name] = seconds(each.epoch)
        ratios.append(times["loop"] / times["bare"])
    parameters = sum(p.numel() for p in bare.model.parameters())
    return f"| {len(network.widenings)} | {parameters:,} | {spread(ratios)} |"


def spread(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


@one_thread()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--network", choices=NETWORKS, default="digits")
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument(
        "--merged", action="store_true", help="measure epochs after a merge"
    )
    arguments = parser.parse_args()
    torch.manual_seed(0)
    network = NETWORKS[arguments.network]()
    if arguments.merged:
        print("| merged seeds | parameters | Grower / ordinary network |")
        print("|---|---|---|")
        print(measure_merged(network, arguments.turns))
        return
    print(
        "| seeds | Grower | ordinary modules | Grower / ordinary modules | grower.step, in validations |"
    )
    print("|---|---|---|---|---|")
    for seeds, blended in ((0, False), (1, False), (3, False), (1, True), (3, True)):
        print(measure(network, seeds, blended, arguments.turns), flush=True)


if __name__ == "__main__":
    main()
