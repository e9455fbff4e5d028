"""Forward passes of a model that a loop trains, and seeds that learn in separate passes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper.core.action import Op
from esper.core.blueprints import BLUEPRINTS
from esper.grower import gradients
from esper.grower.sites import PassHook
from tests.grower.loops import (
    BATCH,
    SAMPLES,
    Loop,
    X,
    Y,
    do,
    net,
    plain,
    plant,
    same,
    script,
    shadowed,
    stages,
    weights,
)

ONES = torch.ones(5, 3)


class Flagged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, flag: bool, *, x: Tensor) -> Tensor:
        if not flag:
            raise ValueError("a user's own error")
        return self.layer(x)  # type: ignore[no-any-return]


def test_the_inputs_of_the_last_training_pass_are_known() -> None:
    model = Flagged()
    passes = PassHook(model)
    model(True, x=ONES)
    model.eval()(True, x=ONES[:2])
    assert passes.last is not None
    assert passes.last[0] == (True,)
    assert passes.last[1]["x"] is ONES
    assert passes.samples == 2


def test_a_site_that_runs_twice_in_a_pass_is_told_from_one_in_the_backward_pass() -> (
    None
):
    model, first = Flagged(), list[bool]()
    passes = PassHook(model)
    model.layer.register_forward_hook(lambda *_: first.append(passes.reach("r0c0")))
    model(True, x=ONES)
    assert passes.reach("r0c0")  # outside, as activation checkpointing does
    with pytest.raises(ValueError, match="own error"):
        model(False, x=ONES)
    assert passes.reach("r0c0")  # after an error, too
    model.layer.register_forward_hook(lambda *_: first.append(passes.reach("r0c0")))
    first.clear()
    model(True, x=ONES)
    assert first == [True, False]


def test_a_copy_has_no_part_in_the_passes_of_the_model() -> None:
    model = Flagged()
    passes = PassHook(model)
    copy.deepcopy(model)(True, x=ONES)
    assert passes.last is None
    passes.remove()
    model(True, x=ONES)
    assert passes.last is None


def test_a_shadow_loss_trains_the_seed_and_changes_no_bit_of_the_model() -> None:
    """Weights, BatchNorm statistics and the random numbers of dropout stay the same."""
    torch.manual_seed(7)
    grown = Loop(model=net(dropout=0.5), step=shadowed, incubation="shadow").run(4)
    torch.manual_seed(7)
    alone = Loop(model=net(dropout=0.5), step=shadowed, controller=None).run(4)
    assert same(weights(grown.model), weights(alone.model))
    seed = grown.grower.hooks.sites["r0c0"].seed
    assert seed is not None
    before = weights(seed)
    grown.run(1)
    assert not same(weights(seed), before)
    assert grown.run().steps[-1].slots["r0c0"].stage == "FOSSILIZED"


def test_a_shadow_loss_leaves_the_buffers_of_other_seeds_alone() -> None:
    registry = BLUEPRINTS.copy()

    @registry.register("mlp", "normed", parameters=lambda channels: 2 * channels)
    def normed(channels: int) -> nn.Module:
        """BatchNorm."""
        return nn.BatchNorm1d(channels)

    first = {
        0: plant("r0c1", "normed"),
        **{epoch: do(Op.ADVANCE, "r0c1") for epoch in (1, 4, 8)},
    }
    second = {9: plant("r0c0"), 10: do(Op.ADVANCE, "r0c0")}
    actions = script({**first, **second})
    loop = Loop(
        controller=actions,
        incubation="shadow",
        step=shadowed,
        epochs=16,
        blueprints=registry,
    ).run(12)
    assert (stages(loop)[-1], stages(loop, "r0c1")[-1]) == ("TRAINING", "HOLDING")
    seed = loop.grower.hooks.sites["r0c1"].seed
    assert seed is not None
    batches = seed.get_buffer("body.num_batches_tracked")
    loop.model.train()
    loop.model(X)  # its own pass
    before = batches.clone()
    loop.grower.incubate(lambda: nn.functional.cross_entropy(loop.model(X), Y))
    assert torch.equal(batches, before)
    loop.model(X)
    assert int(batches) == int(before) + 1


@pytest.mark.slow
def test_a_seed_with_passes_of_its_own_is_tried_with_the_statistics_of_these() -> None:
    """BatchNorm removes a shift, unless its statistics were gathered without the seed."""
    registry = BLUEPRINTS.copy()

    class Shift(nn.Module):
        def __init__(self, channels: int) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.full((channels,), 1000.0))

        def forward(self, h: Tensor) -> Tensor:
            return torch.zeros_like(h) + self.shift

    registry.register("mlp", "shift", parameters=lambda channels: channels)(Shift)
    actions = script({0: plant("r0c1", "shift"), 1: do(Op.ADVANCE, "r0c1")})
    trials = {}
    for incubation, step in (("shadow", shadowed), ("ste", plain)):
        loop = Loop(
            controller=actions,
            incubation=incubation,
            step=step,
            epochs=30,
            blueprints=registry,
        ).run(28)
        assert stages(loop, "r0c1")[-1] == "TRAINING"
        assert loop.steps[-1].score > 0.9
        trials[incubation] = loop.steps[-1].slots["r0c1"].trial
    assert trials["shadow"] == pytest.approx(0, abs=0.05)
    assert trials["ste"] is not None
    assert trials["ste"] < -0.3


def test_a_missing_shadow_loss_is_an_error() -> None:
    with pytest.raises(
        RuntimeError, match=r"r0c0 has learned nothing: .*call grower\.incubate"
    ):
        Loop(incubation="shadow").run()
    with pytest.raises(RuntimeError, match="needs incubation='shadow'"):
        Loop(step=shadowed).run(1)


class Recurs(nn.Module):
    """One layer that runs three times, as in ALBERT."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = (
            nn.Sequential(nn.Linear(8, 8), nn.ReLU()),
            nn.Linear(8, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def by_hand(model: Recurs, seed: nn.Module, alpha: float, x: Tensor) -> Tensor:
    for _ in range(3):
        x = torch.relu(model.layer[0](x))  # without the hook of the layer
        x = x + alpha * seed(x)
    return model.head(x)  # type: ignore[no-any-return]


def test_a_seed_on_a_layer_that_runs_several_times_acts_and_learns_in_each_run() -> (
    None
):
    torch.manual_seed(0)
    loop = Loop(
        model=Recurs(), sites={"r0c0": "layer"}, step=shadowed, incubation="shadow"
    ).run(2)
    site = loop.grower.hooks.sites["r0c0"]
    assert site.seed is not None
    x, y = X[:4], Y[:4]
    seen: dict[nn.Parameter, Tensor] = {}
    loop.model.train()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loop.grower.hooks, "stash", seen.__setitem__)
        loop.grower.hooks.incubate(
            lambda: nn.functional.cross_entropy(loop.model(x), y)
        )
    loss = nn.functional.cross_entropy(
        by_hand(loop.model, site.seed.body, site.target, x), y
    )  # type: ignore[arg-type]
    parameters = [*site.seed.parameters()]
    wanted = dict(zip(parameters, torch.autograd.grad(loss, parameters), strict=True))
    assert seen.keys() == wanted.keys()
    for parameter, gradient in wanted.items():
        torch.testing.assert_close(seen[parameter], gradient)
    loop.run()
    assert loop.grower.kept == {"r0c0": "mlp_small"}
    before = loop.model.eval()(x)
    torch.testing.assert_close(
        before, by_hand(loop.model, site.seed.body, site.alpha, x)
    )  # type: ignore[arg-type]
    assert torch.equal(loop.grower.finish()(x), before)


def test_in_an_epoch_without_seeds_gradients_are_not_measured_and_sites_work_in_its_first_pass_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = Loop(
        controller=script({4: plant("r0c0"), 5: do(Op.ADVANCE, "r0c0")}), epochs=16
    ).run(2)
    hooks = loop.grower.hooks
    measured: list[object] = []
    worked: list[str] = []
    reach, measure = hooks.passes.reach, gradients.measure

    def count_work(name: str) -> bool:
        worked.append(name)
        return reach(name)

    def count_measured(*arguments: Any, **keywords: Any) -> Any:
        measured.append(arguments)
        return measure(*arguments, **keywords)

    monkeypatch.setattr(hooks.passes, "reach", count_work)
    monkeypatch.setattr(gradients, "measure", count_measured)
    loop.run(1)
    assert sorted(worked) == ["r0c0", "r0c1"]
    assert measured == []
    loop.run(4)  # the seed learns
    batches = SAMPLES // BATCH
    worked.clear()
    measured.clear()
    loop.run(1)
    assert worked.count("r0c0") >= batches
    assert len(measured) == batches


@pytest.mark.slow
def test_a_compiled_function_around_the_model_trains_as_the_function_itself() -> None:
    """Compiled code does not notice hooks that come and go."""

    def loop_with(compiles: bool) -> Loop:
        def loss_of(loop: Loop, x: Tensor, y: Tensor) -> Tensor:
            return nn.functional.cross_entropy(loop.model(x), y)

        loss = torch.compile(loss_of, backend="eager") if compiles else loss_of

        def step(loop: Loop, x: Tensor, y: Tensor) -> None:
            loop.optimizer.zero_grad()
            loss(loop, x, y).backward()
            loop.optimizer.step()

        return Loop(step=step, epochs=7).run()

    torch._dynamo.reset()
    found, wanted = loop_with(True), loop_with(False)
    assert found.grower.hooks.sites["r0c0"].on
    assert same(weights(found.model), weights(wanted.model))
    seeds = [loop.grower.hooks.sites["r0c0"].seed for loop in (found, wanted)]
    assert same(weights(seeds[0]), weights(seeds[1]))
