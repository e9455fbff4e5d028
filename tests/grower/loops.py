"""Small training loops as a user writes them, and a controller that plays a list of actions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from esper.agents.controller import EnvView, PerEnvController
from esper.agents.make import OwnController
from esper.config import TrainingConfig
from esper.core.action import Op
from esper.grower.env import LoopEnv
from esper.grower.grower import Grower
from esper.grower.report import GrowthStep
from esper.hosts.find import Sites

SITES = {"r0c0": "body.0", "r0c1": "body.2"}
SAMPLES, BATCH = 64, 16
LENIENT = TrainingConfig().with_values(
    env={"gates": {"trial_standard_errors": 1000.0}, "at_once": False}
)
"""A trial opens its gate however bad it is, and every seed is tried."""

Action = tuple[Op, dict[str, Any]]


def plant(slot: str, blueprint: str = "mlp_small") -> Action:
    return Op.GERMINATE, {"slot": slot, "blueprint": blueprint, "tempo": 3}


def do(op: Op, slot: str) -> Action:
    return op, {"slot": slot}


GROW: dict[int, Action] = {
    0: plant("r0c0"),
    1: do(Op.ADVANCE, "r0c0"),
    4: do(Op.ADVANCE, "r0c0"),
    8: do(Op.ADVANCE, "r0c0"),
    9: do(Op.FOSSILIZE, "r0c0"),
}
"""Grows one seed from germination to a fossil, by the number of decisions so far."""


class Script(PerEnvController):
    """Plays ``actions`` at these decisions, and waits otherwise."""

    def __init__(self, env: LoopEnv, actions: Mapping[int, Action]) -> None:
        super().__init__(env.action_spec, env.layout, 1)
        self.actions = actions

    def choose(self, env: int, view: EnvView) -> Any:
        op, values = self.actions.get(view.epoch, (Op.WAIT, {}))
        return self.spec.encode(op, **values)


def script(actions: Mapping[int, Action]) -> OwnController:
    return lambda env: Script(env, actions)


GROWS = script(GROW)


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(8, 12),
            nn.ReLU(),
            nn.Linear(12, 12),
            nn.BatchNorm1d(12),
            nn.ReLU(),
        )
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(self.body(x)))  # type: ignore[no-any-return]


def data(n: int = SAMPLES) -> tuple[Tensor, Tensor]:
    """Inputs [n, 8] and classes [n] that a line does not separate."""
    x = torch.randn(n, 8, generator=torch.Generator().manual_seed(1))
    return x, (x[:, 0] * x[:, 1] > 0).long() + (x[:, 2] > 0.5).long()


def net(seed: int = 0, dropout: float = 0.0) -> Net:
    torch.manual_seed(seed)
    return Net(dropout)


X, Y = data()


def scores(model: nn.Module) -> Tensor:
    """Returns for each of 64 samples whether it is right, [64]."""
    model.eval()
    return (model(X).argmax(1) == Y).double()


class Loop:
    """A model with an optimizer, trained on 64 samples in batches of 16.

    Args:
        step: replaces the plain step of a batch.
        early: whether the controller acts before the first epoch.
        arguments: of the Grower; ``controller`` None: no growth at all.
    """

    def __init__(
        self,
        make_optimizer: Callable[[Any], torch.optim.Optimizer] = lambda p: (
            torch.optim.SGD(p, 0.1, momentum=0.9)
        ),
        model: nn.Module | None = None,
        controller: str | OwnController | None = GROWS,
        epochs: int = 14,
        early: bool = False,
        step: Callable[[Loop, Tensor, Tensor], None] | None = None,
        make_scheduler: Callable[[Any], Any] | None = None,
        sites: Sites = SITES,
        **arguments: Any,
    ) -> None:
        self.model = net() if model is None else model
        self.optimizer = make_optimizer(self.model.parameters())
        self.scheduler = (
            None if make_scheduler is None else make_scheduler(self.optimizer)
        )
        self.epochs, self.take, self.early = epochs, step or plain, early
        self.steps: list[GrowthStep] = []
        self.epoch = 0
        self.grower: Any = None
        if controller is not None:
            arguments = {
                "topology": "mlp",
                "config": LENIENT,
                "scheduler": self.scheduler,
                **arguments,
            }
            self.grower = Grower(
                self.model, sites, self.optimizer, controller, epochs, **arguments
            )

    def train(self) -> None:
        """Trains an epoch, without growing."""
        self.model.train()
        order = torch.randperm(
            SAMPLES, generator=torch.Generator().manual_seed(self.epoch)
        )
        for rows in order.split(BATCH):
            self.take(self, X[rows], Y[rows])
            if self.scheduler is not None and not isinstance(
                self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau
            ):
                self.scheduler.step()
        self.epoch += 1

    def run(self, epochs: int | None = None) -> Loop:
        if self.early and self.epoch == 0 and self.grower is not None:
            self.steps.append(self.grower.start(scores))
        for _ in range(self.epochs - self.epoch if epochs is None else epochs):
            self.train()
            if self.grower is not None:
                self.steps.append(self.grower.step(scores))
        return self


def shadowed(loop: Loop, x: Tensor, y: Tensor) -> None:
    """A step that also trains incubating seeds in passes of their own."""
    loop.optimizer.zero_grad()
    nn.functional.cross_entropy(loop.model(x), y).backward()  # type: ignore[no-untyped-call]
    if loop.grower is not None:
        loop.grower.incubate(lambda: nn.functional.cross_entropy(loop.model(x), y))
    loop.optimizer.step()


def plain(loop: Loop, x: Tensor, y: Tensor) -> None:
    loss = nn.functional.cross_entropy(loop.model(x), y)
    loop.optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    loop.optimizer.step()


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether tensors of the same names have the same bits."""
    return one.keys() == other.keys() and all(
        torch.equal(one[name], other[name]) for name in one
    )


def stages(loop: Loop, slot: str = "r0c0") -> list[str]:
    return [step.slots[slot].stage for step in loop.steps]
