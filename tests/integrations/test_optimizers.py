"""Optimizers of torch, timm, schedulefree and transformers update seeds: planted late, removed, replanted, resumed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper.config import ConfigError
from esper.core.action import Op
from tests.grower.loops import (
    Loop,
    do,
    net,
    plant,
    same,
    scores,
    script,
    stages,
    weights,
)

timm_optim = pytest.importorskip("timm.optim")
schedulefree = pytest.importorskip("schedulefree")
transformers = pytest.importorskip("transformers")

Make = Callable[[Any], Any]

OF_TORCH = (
    "ASGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)
FAST = {
    "torch.Adagrad",
    "timm.lookahead_adam",
    "timm.lamb",
    "schedulefree.AdamWScheduleFree",
    "schedulefree.ScheduleFreeWrapper",
}
"""One of each kind, for the tests that run first."""
DRAWS = {"timm.kron", "timm.kronc", "timm.kronw"}
"""They draw random numbers from a state that they do not save, so no loop with them resumes to the same bits."""


def _of_timm(name: str) -> Make:
    # LAMB clips by the norm of all gradients unless that is switched off, and is refused with it.
    options = {"max_grad_norm": None} if "lamb" in name else {}
    return lambda p: timm_optim.create_optimizer_v2(p, opt=name, lr=0.01, **options)


def _makers() -> dict[str, Make]:
    makers: dict[str, Make] = {
        f"torch.{name}": lambda p, name=name: getattr(torch.optim, name)(p, lr=0.01)
        for name in OF_TORCH
    }
    # Those of bitsandbytes and apex need a GPU.
    names = timm_optim.list_optimizers(exclude_filters=["bnb*", "fused*", "adahessian"])
    makers |= {f"timm.{name}": _of_timm(name) for name in [*names, "lookahead_adam"]}
    for name in dir(schedulefree):
        if name.endswith(
            ("ScheduleFree", "ScheduleFreeReference", "ScheduleFreePaper")
        ):
            makers[f"schedulefree.{name}"] = lambda p, name=name: getattr(
                schedulefree, name
            )(p, lr=0.05)
    for name in ("ScheduleFreeWrapper", "ScheduleFreeWrapperReference"):
        makers[f"schedulefree.{name}"] = lambda p, name=name: getattr(
            schedulefree, name
        )(torch.optim.SGD(p, lr=0.05))
    makers["transformers.Adafactor"] = transformers.optimization.Adafactor
    return makers


MAKERS = _makers()
LATE, REPLANTED = 3, 10
ACTIONS = {
    LATE: plant("r0c0"),
    LATE + 1: do(Op.ADVANCE, "r0c0"),
    LATE + 4: (Op.PRUNE, {"slot": "r0c0", "alpha_speed": 0}),
    REPLANTED: plant("r0c0"),
    REPLANTED + 1: do(Op.ADVANCE, "r0c0"),
    REPLANTED + 4: do(Op.ADVANCE, "r0c0"),
}
EPOCHS = REPLANTED + 7


class ModeLoop(Loop):
    """A loop that says to an optimizer whether it trains or evaluates, if the optimizer wants to know."""

    def train(self) -> None:
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()
        super().train()

    def run(self, epochs: int | None = None) -> Loop:
        for _ in range(self.epochs - self.epoch if epochs is None else epochs):
            self.train()
            assert self.grower is not None
            self.steps.append(self.grower.step(self._score))
        return self

    def _score(self, model: nn.Module) -> Tensor:
        if hasattr(self.optimizer, "eval"):
            self.optimizer.eval()
        result = scores(model)
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()
        return result


def _begun(name: str, seed: int = 0) -> Loop:
    torch.manual_seed(0)
    return ModeLoop(MAKERS[name], net(seed), script(ACTIONS), epochs=EPOCHS)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in FAST else pytest.mark.slow)
        for name in MAKERS
    ],
)
def test_an_optimizer_updates_seeds_and_resumes(name: str) -> None:
    whole = _begun(name).run()
    assert {"TRAINING", "PRUNED"} <= set(stages(whole))
    assert stages(whole)[-1] in ("BLENDING", "HOLDING")
    assert whole.grower is not None
    seed = whole.grower.groups.groups["r0c0"]["params"]
    assert all(torch.isfinite(p).all() for p in seed)
    if name in DRAWS:
        return
    for cut in (LATE + 3, REPLANTED + 5):
        first = _begun(name).run(cut)
        assert first.grower is not None
        saved = copy.deepcopy(
            [
                first.model.state_dict(),
                first.grower.state_dict(),
                first.optimizer.state_dict(),
            ]
        )
        second = _begun(name, seed=5)
        assert second.grower is not None
        second.model.load_state_dict(saved[0])
        second.grower.load_state_dict(saved[1])
        if hasattr(second.optimizer, "train"):
            second.optimizer.train()
        second.optimizer.load_state_dict(saved[2])
        second.epoch = cut
        second.run()
        assert same(weights(second.model), weights(whole.model)), (
            f"cut after {cut} epochs"
        )


def test_an_optimizer_of_known_parameters_is_refused_before_training() -> None:
    with pytest.raises(
        ConfigError,
        match="Adahessian cannot update seeds: it knows only the parameters",
    ):
        Loop(_of_timm("adahessian"))


@pytest.mark.parametrize(("name", "counters"), [
    ("schedulefree.SGDScheduleFree", ("k", "weight_sum")),
    ("schedulefree.RAdamScheduleFree", ("k",)),
    ("schedulefree.ScheduleFreeWrapper", ("k", "weight_sum")),
    ("timm.lookahead_adam", ("lookahead_step",)),
    ("timm.adan", ("step",)),
])  # fmt: skip
def test_counters_in_the_group_of_a_seed_count_its_own_steps(
    name: str, counters: tuple[str, ...]
) -> None:
    """As many steps after planting as another optimizer has made since it was new, they have the same values."""
    loop = ModeLoop(MAKERS[name], net(), script({LATE: plant("r0c0")}), epochs=6).run(
        LATE + 3
    )
    new = ModeLoop(MAKERS[name], net(), script({}), epochs=6).run(2)
    host, seed = loop.optimizer.param_groups
    fresh = new.optimizer.param_groups[0]
    for counter in counters:
        assert seed[counter] == fresh[counter] != host[counter]


def test_a_seed_under_lookahead_gets_slow_weights() -> None:
    loop = Loop(
        MAKERS["timm.lookahead_adam"],
        controller=script({0: plant("r0c0"), 1: do(Op.ADVANCE, "r0c0")}),
    ).run(5)
    assert loop.grower is not None
    seed = loop.grower.groups.groups["r0c0"]["params"]
    assert all(
        "lookahead_slow_buff" in loop.grower.groups.optimizer.state[p] for p in seed
    )
