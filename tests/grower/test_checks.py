"""Input that a Grower refuses, with the reason and before anything is trained or planted."""

from __future__ import annotations

import copy
import math
import re
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from esper.config import ConfigError
from esper.grower.grower import Grower
from tests.grower.loops import SITES, Loop, Net, X, Y, net, plain, scores, weights


class Wrapper:
    """Leaves each step to the optimizer inside, as that of accelerate does."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.step()


def test_a_step_without_training_and_one_too_many_are_refused() -> None:
    loop = Loop(epochs=3)
    with pytest.raises(
        RuntimeError, match=r"has not stepped since the last grower\.step"
    ):
        loop.grower.step(scores)
    loop.run(1)
    with pytest.raises(
        RuntimeError, match=r"has not stepped since the last grower\.step"
    ):
        loop.grower.step(scores)
    loop.run()
    loop.train()
    with pytest.raises(RuntimeError, match="all 3 epochs are over"):
        loop.grower.step(scores)


def test_an_early_start_after_training_or_a_second_one_is_refused() -> None:
    loop = Loop()
    loop.train()
    with pytest.raises(RuntimeError, match="comes once, before the first epoch"):
        loop.grower.start(scores)
    loop = Loop(early=True).run(0)
    with pytest.raises(RuntimeError, match="comes once, before the first epoch"):
        loop.grower.start(scores)


def test_a_model_that_never_trains_in_training_mode_is_refused_before_a_seed_is_planted() -> (
    None
):
    loop = Loop()
    loop.model.train = lambda mode=True: nn.Module.train(loop.model, False)  # type: ignore[method-assign,assignment]
    loop.train()
    with pytest.raises(
        RuntimeError,
        match=r"in training mode has run slot r0c0, r0c1: call model\.train\(\) before",
    ):
        loop.grower.step(scores)
    assert len(loop.optimizer.param_groups) == 1


def test_a_grower_that_was_never_stepped_cannot_finish() -> None:
    loop = Loop()
    loop.train()
    with pytest.raises(RuntimeError, match="never called"):
        loop.grower.finish()


def test_impossible_arguments_are_refused_before_training() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def refused(words: str, **changed: Any) -> None:
        arguments: dict[str, Any] = {
            "model": model,
            "sites": SITES,
            "optimizer": optimizer,
            "horizon": 5,
            "topology": "mlp",
            **changed,
        }
        with pytest.raises(ConfigError, match=words):
            Grower(**arguments)
        assert not any(module._forward_hooks for module in model.modules())
        assert len(optimizer.param_groups) == 1

    refused("no submodule 'bod'", sites={"r0c0": "bod"})
    refused("not of the form r0c0", sites={"one": "body"})
    refused("unknown topology 'rnn'; known: cnn", topology="rnn")
    refused("horizon is 1", horizon=1)
    refused("horizon is None", horizon=None)
    refused("points is 0", points=0)
    refused("lr_factor is nan", lr_factor=math.nan)
    refused(
        r"unknown controller 'huristic' \(did you mean 'heuristic'\?\); known",
        controller="huristic",
    )
    refused("not a torch.optim.Optimizer", optimizer=model)
    refused("one after each of the 5 epochs", baseline=[0.1, 0.2])
    refused("'ste' or 'shadow'", incubation="own")
    refused(r"samples is '9'; it must be a number of 1", samples="9")
    refused("samples is data that has no length", samples=torch.tensor(9))
    refused(r"classes is \[0, 1, 2, 3, 4, 5, ...\]; it", classes=list(range(99)))
    refused("the model is compiled", model=torch.compile(model))
    refused("use DistributedDataParallel", model=nn.DataParallel(model))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"classes": 4},
            "classes is 4, more than the outputs of the model for a sample, 3",
        ),
        ({"price": 8, "controller": "heuristic"}, "price= has no effect on controller"),
        (
            {"price": 8, "classes": None},
            r"heuristic, .* \(.*it needs .* and classes=\)",
        ),
    ],
)
def test_arguments_of_the_advisor_that_do_not_fit_or_have_no_effect_are_refused(
    changed: dict[str, Any], words: str
) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    arguments = {"samples": 64, "classes": 3, "example": X[:4], **changed}
    with pytest.raises(ConfigError, match=words):
        Grower(model, ["body.0 -> body.2"], optimizer, horizon=5, **arguments)
    assert not any(module._forward_hooks for module in model.modules())


def test_a_price_reaches_a_custom_controller() -> None:
    assert Loop(price=8.0).grower.config.reward.price == 8.0


@pytest.mark.parametrize("result", [55.0, None])
def test_a_score_of_no_pass_of_the_model_is_named(result: float | None) -> None:
    loop = Loop()
    with pytest.raises(
        ConfigError, match="evaluate has not run the model, and nothing"
    ):
        loop.grower.start(lambda model: result)
    assert len(loop.optimizer.param_groups) == 1


def test_samples_are_counted_in_any_data_with_a_length() -> None:
    for samples in (50, torch.zeros(50, 3), [{"x": 1}] * 50, range(50)):
        loop = Loop(samples=samples)
        assert loop.grower._setting.samples == 50


def test_features_that_no_seed_fits_are_refused_in_the_first_batch() -> None:
    loop = Loop(topology="cnn")
    with pytest.raises(
        ConfigError, match="cnn seeds need floating-point features with 4 dimensions"
    ):
        loop.train()


def test_a_submodule_that_never_runs_is_named() -> None:
    class Idle(Net):
        def __init__(self) -> None:
            super().__init__()
            self.idle = nn.Linear(3, 3)

    loop = Loop(model=Idle(), sites={"r0c0": "body.0", "r0c1": "idle"})
    loop.train()
    with pytest.raises(ConfigError, match=r"slot r0c1 \(idle\)"):
        loop.grower.step(scores)


@pytest.mark.parametrize("end", ["finish", "close"])
def test_after_its_end_a_grower_only_tells_what_grew(end: str) -> None:
    loop = Loop().run(11)
    grower = loop.grower
    getattr(grower, end)()
    told, state = str(grower.summary()), weights(loop.model)
    loop.train()
    for call in (
        partial(grower.step, scores),
        grower.finish,
        partial(grower.measure_need, torch.zeros, torch.zeros),
        partial(grower.follow, copy.deepcopy(loop.model)),
    ):
        with pytest.raises(RuntimeError, match="growth has ended"):
            call()
    grower.close()
    assert str(grower.summary()) == told
    assert weights(loop.model).keys() == state.keys()


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"epochs": 20}, "horizon=14, not 20"),
        ({"epochs": 7}, "horizon=14, not 7"),
        ({"controller": "heuristic"}, "not 'heuristic'"),
        ({"sites": {"r0c0": "body.2", "r0c1": "body.0"}}, "'r0c0': 'body.0'"),
        ({"sites": ["body.0"]}, "'r0c1': 'body.2'"),
        ({"governor": True}, "governor=False, not True"),
        ({"points": 1.0}, "points=100.0, not 1.0"),
        ({"incubation": "shadow"}, "incubation='ste', not 'shadow'"),
    ],
)
def test_a_state_of_a_grower_with_other_arguments_is_refused(
    other: dict[str, Any], named: str
) -> None:
    """Seeds would be planted at other sites, or scores compared in other units."""
    state = Loop().run(6).grower.state_dict()
    loop = Loop(**other)
    with pytest.raises(ConfigError, match=re.escape(named)):
        loop.grower.load_state_dict(state)
    assert len(loop.optimizer.param_groups) == 1


def test_a_loop_that_resumes_is_not_told_that_its_seeds_are_no_part_of_the_state() -> (
    None
):
    first = Loop().run(6)
    states = [
        copy.deepcopy(part.state_dict())
        for part in (first.grower, first.model, first.optimizer)
    ]
    second = Loop()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for part, state in zip(
            (second.grower, second.model, second.optimizer), states, strict=True
        ):
            part.load_state_dict(state)
    assert second.grower.hooks.sites["r0c0"].on


class Loops(nn.Module):
    """Its forward pass goes through what it finds in itself."""

    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.layers = layers
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers(self):
            x = layer(x).tanh() if isinstance(layer, nn.Module) else x * layer
        return self.head(x)


def linears(model: nn.Module) -> Any:
    return [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name != "head"
    ]


def parameters(model: Any) -> Any:
    return [model.a, model.b, 0.001 * sum(p.numel() for p in model.parameters())]


def children(model: nn.Module) -> Any:
    return [child for name, child in model.named_children() if name != "head"]


@pytest.mark.parametrize("layers", [linears, parameters])
def test_a_model_that_would_notice_its_seeds_gets_none(
    layers: Any, caplog: Any
) -> None:
    """Otherwise the end would fail, after all epochs."""
    loop = Loop(model=Loops(layers), sites={"r0c0": "b"}).run()  # type: ignore[arg-type]
    assert "computes something else with a seed among its submodules" in caplog.text
    assert not loop.grower.kept
    wanted = loop.model.eval()(X)
    assert torch.equal(loop.grower.finish()(X), wanted)
    assert weights(loop.model).keys() == weights(Loops(layers)).keys()


def test_a_model_that_goes_through_its_children_grows() -> None:
    """Seeds are in the layers that they add to, and not among these."""
    loop = Loop(model=Loops(children), sites={"r0c0": "b"}).run()  # type: ignore[arg-type]
    assert loop.grower.kept
    wanted = loop.model.eval()(X)
    assert torch.equal(loop.grower.finish()(X), wanted)


def test_a_model_that_is_left_in_eval_mode_is_named_as_the_cause() -> None:
    loop = Loop()
    loop.run(3)
    loop.model.eval()
    for rows in torch.arange(64).split(16):
        plain(loop, X[rows], Y[rows])
    with pytest.raises(
        RuntimeError, match=r"no pass in training mode has run .*call model\.train\(\)"
    ):
        loop.grower.step(scores)


@pytest.mark.parametrize("late", [False, True])
def test_a_group_that_has_the_key_of_seeds_is_refused(late: bool) -> None:
    """It would be taken for a seed's, and hidden from schedules."""
    model = net()
    groups: Any = [{"params": model.body.parameters()}]
    groups.append({"params": model.head.parameters(), "slot": "mine"})
    if late:  # as from the state of an optimizer of another process
        groups[1]["slot"] = "kept r0c0"
    optimizer = torch.optim.SGD(groups, 0.1)
    with pytest.raises(ConfigError, match=r"parameter group 1 .* has the key 'slot'"):
        Grower(model, SITES, optimizer, topology="mlp")


@pytest.mark.parametrize("wrap", [lambda inner: inner, Wrapper])
def test_an_optimizer_of_another_model_is_refused_before_anything_is_hooked(
    wrap: Any,
) -> None:
    """The model would not learn, and nothing would say so."""
    model = net()
    optimizer = torch.optim.AdamW(net().parameters())
    with pytest.raises(
        ConfigError,
        match="holds 8 parameters and none of the 8 of this model that need gradients",
    ):
        Grower(model, SITES, wrap(optimizer), topology="mlp")
    assert not any(module._forward_hooks for module in model.modules())
    assert len(optimizer.param_groups) == 1


def test_an_optimizer_of_a_part_of_what_is_trained_is_taken() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.head.parameters(), 0.1)
    Grower(model, SITES, optimizer, topology="mlp")


def test_an_optimizer_of_another_part_of_a_frozen_model_is_refused() -> None:
    model = net()
    model.body.requires_grad_(False)
    optimizer = torch.optim.SGD(model.body.parameters(), 0.1)
    with pytest.raises(ConfigError, match="none of the 2 of this model that need"):
        Grower(model, SITES, optimizer, topology="mlp")


def test_an_optimizer_beside_a_model_that_is_frozen_as_a_whole_is_taken() -> None:
    model = net().requires_grad_(False)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)
    Grower(model, SITES, optimizer, topology="mlp")


def test_an_optimizer_of_a_flat_tensor_that_parameters_are_views_of_is_taken() -> None:
    model = net()
    flat = nn.Parameter(nn.utils.parameters_to_vector(model.parameters()).detach())
    nn.utils.vector_to_parameters(flat.data, model.parameters())
    Grower(model, SITES, torch.optim.SGD([flat], 0.1), topology="mlp")


def test_an_optimizer_that_gets_its_parameters_later_is_taken() -> None:
    optimizer = torch.optim.SGD([{"params": []}], 0.1)
    Grower(net(), SITES, optimizer, topology="mlp")


def test_an_optimizer_that_is_divided_among_ranks_is_refused() -> None:
    kind = type("ZeroRedundancyOptimizer", (torch.optim.SGD,), {})
    kind.__module__ = "torch.distributed.optim"
    with pytest.raises(ConfigError, match="divides the parameters"):
        Grower(net(), SITES, kind(net().parameters(), 0.1), topology="mlp")


def test_an_argument_that_a_pass_uses_up_is_named() -> None:
    class Joins(Net):
        def forward(self, parts: Any) -> Any:
            return super().forward(torch.cat(list(parts), 1))

    model = Joins()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    grower = Grower(model, ["body.0"], optimizer, horizon=3)
    nn.functional.cross_entropy(model(part for part in X.split(4, 1)), Y).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    with pytest.raises(ConfigError, match=r"an iterator, which one pass uses up"):
        grower.step(lambda model: 0.5)
