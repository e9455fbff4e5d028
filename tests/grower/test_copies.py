"""Copies, pickles and averages of a model that grows."""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import esper
from esper.config import ConfigError
from esper.core.action import Op
from esper.hosts.container import CONTAINER
from tests.grower.loops import (
    GROW,
    LENIENT,
    SITES,
    Loop,
    X,
    Y,
    net,
    plain,
    plant,
    same,
    scores,
    script,
    weights,
)

PRUNED = script({**GROW, 9: (Op.PRUNE, {"slot": "r0c0", "alpha_speed": 0})})


def pickled(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def outputs(model: nn.Module) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        return model(X)  # type: ignore[no-any-return]


@pytest.mark.parametrize("epochs", [1, 3, 6])
def test_a_copy_computes_what_the_model_computed_when_it_was_taken(epochs: int) -> None:
    """Before anything is planted, germinated, in training, half blended in, and at its full alpha."""
    loop = Loop(controller=PRUNED).run(epochs)
    wanted = outputs(loop.model)
    others = [pickled(loop.model), copy.deepcopy(loop.model)]
    assert all(torch.equal(outputs(other), wanted) for other in others)
    loop.run()
    loop.grower.finish()
    assert all(torch.equal(outputs(other), wanted) for other in others), (
        "the model went on without them"
    )
    assert not torch.equal(outputs(loop.model), wanted)


def test_a_copy_has_the_seeds_that_are_on_as_parameters_of_their_submodule() -> None:
    loop = Loop().run(6)
    other = copy.deepcopy(loop.model)
    seeds = [name for name, _ in other.named_parameters() if CONTAINER in name]
    assert seeds
    assert all(name.startswith(f"body.0.{CONTAINER}.r0c0.") for name in seeds)
    own = [name for name in other.state_dict() if name not in seeds]
    assert own == list(loop.model.state_dict())
    optimizer = torch.optim.SGD(other.parameters(), 0.1)
    before = weights(other)
    nn.functional.cross_entropy(
        other.train()(X), torch.zeros(len(X), dtype=torch.long)
    ).backward()
    optimizer.step()
    moved = [
        name
        for name, value in other.state_dict().items()
        if not torch.equal(value, before[name])
    ]
    assert any(CONTAINER in name for name in moved), (
        "it trains on its own, seeds included"
    )


def test_a_model_that_looks_at_itself_finds_nothing_while_it_grows() -> None:
    """Children, modules, parameters and state are as without a Grower at every moment before the end."""
    loop = Loop()
    for _ in range(loop.epochs):
        loop.run(1)
        for own, other in zip(loop.model.modules(), net().modules(), strict=True):
            assert own._modules.keys() == other._modules.keys()
        assert loop.model.state_dict().keys() == net().state_dict().keys()


def test_a_copy_can_be_grown_itself() -> None:
    other = copy.deepcopy(Loop().run(1).model)
    assert not other(X).isnan().any()
    again = Loop(model=other).run()
    wanted = outputs(other)
    again.grower.finish()
    assert torch.equal(outputs(other), wanted)


def test_a_model_that_grows_is_refused_by_a_second_grower() -> None:
    loop = Loop().run(6)
    before = outputs(loop.model)
    optimizer = torch.optim.SGD(loop.model.parameters(), 0.1)
    for model, sites in (
        (loop.model, SITES),
        (loop.model.body, {"r0c0": "0"}),
        (nn.Sequential(loop.model), None),
    ):
        with pytest.raises(
            esper.ConfigError,
            match=r"another Grower grows this model, at .*finish\(\).*close\(\)",
        ):
            esper.Grower(
                model,
                sites or {"r0c0": "0.body.0"},
                optimizer,
                topology="mlp",
                config=LENIENT,
            )
    assert torch.equal(outputs(loop.model), before), "the first one goes on"
    loop.run()
    assert loop.grower.kept


def test_close_leaves_the_model_and_the_optimizer_as_if_nothing_had_grown() -> None:
    loop = Loop().run(6)
    own = net()
    own.load_state_dict(loop.model.state_dict())
    loop.grower.close()
    assert torch.equal(outputs(loop.model), outputs(own))
    assert [name for name, _ in loop.model.named_modules()] == [
        name for name, _ in own.named_modules()
    ]
    assert not any(
        m._forward_hooks or m._forward_pre_hooks for m in loop.model.modules()
    )
    assert len(loop.optimizer.param_groups) == 1
    assert Loop(model=loop.model).run().steps[-1].done, "it can be grown again"


@pytest.mark.parametrize("epochs", [0, 2, 7])
def test_an_average_follows_whenever_it_was_made(epochs: int) -> None:
    """Made before the Grower, before the seed is on, and while it is."""
    model = net()
    average = (
        AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        if epochs == 0
        else None
    )
    made = [] if average is None else [average]
    loop = Loop(model=model, averages=made).run(epochs)
    if average is None:
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        loop.grower.follow(average)
    for _ in range(epochs, loop.epochs):
        loop.run(1)
        average.update_parameters(model)
    network = loop.grower.finish()
    assert list(average.module.state_dict()) == list(network.state_dict())
    for _ in range(40):
        average.update_parameters(network)
    torch.testing.assert_close(outputs(average), outputs(network), rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        for parameter in average.parameters():
            parameter.zero_()
    assert scores(network).mean() > 0.5, "its seeds are copies"


def test_an_average_uses_the_seeds_that_are_on() -> None:
    model = net()
    average = AveragedModel(model)
    loop = Loop(model=model, epochs=20, averages=[average]).run(9)
    average.module.load_state_dict(model.state_dict())
    assert torch.equal(outputs(average), outputs(model))
    with loop.grower.hooks.override_alphas({"r0c0": 0.0}):
        alone = outputs(model)
    assert not torch.equal(alone, outputs(model))


def reloaded(loop: Loop) -> None:
    loop.model.load_state_dict(loop.model.state_dict())


def reloaded_part(loop: Loop) -> None:
    loop.model.body.load_state_dict(loop.model.body.state_dict())


def reloaded_whole(loop: Loop) -> None:
    whole = nn.Sequential(loop.model)
    whole.load_state_dict(whole.state_dict())


@pytest.mark.parametrize("part", [False, True])
def test_a_state_of_wider_layers_that_comes_before_that_of_the_grower_names_the_order(
    part: bool,
) -> None:
    model = Loop().model  # with the Grower's hooks
    state = model.state_dict()
    state["body.0.weight"] = torch.zeros(24, 8)
    whole = nn.Sequential(model) if part else model
    named = {f"0.{key}" if part else key: value for key, value in state.items()}
    with pytest.raises(RuntimeError) as error:
        whole.load_state_dict(named)
    said = str(error.value)
    assert said.count("call grower.load_state_dict() first") == 1
    assert said.index("grower.load_state_dict") < said.index("size mismatch for")


@pytest.mark.parametrize("load", [reloaded, reloaded_part, reloaded_whole])
def test_a_state_that_is_loaded_while_seeds_are_on_is_said_once(load: Any) -> None:
    """It has no seeds, so that an epoch is not restored by it."""
    loop = Loop().run(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(loop)  # the seed only learns
    loop.run(3)
    with pytest.warns(
        UserWarning,
        match=r"seeds in slot r0c0 .* stay as they are: .*make a new Grower",
    ):
        load(loop)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(loop)
        load_copy = copy.deepcopy(loop.model)
        load_copy.load_state_dict(load_copy.state_dict())


@pytest.mark.parametrize("epoch", [2, 6, 12])
def test_seeds_follow_a_model_that_is_moved_to_another_dtype(epoch: int) -> None:
    """While they learn, while they are on, and when one is kept; with their optimizer state."""
    loop = Loop(
        make_optimizer=lambda p: torch.optim.Adam(p, 0.01), step=in_dtype_of_model
    )
    loop.run(epoch)
    loop.model.double()
    for state in loop.optimizer.state.values():
        for key in ("exp_avg", "exp_avg_sq"):
            if key in state and state[key].shape == torch.Size(state[key].shape):
                state[key] = state[key].double()
    for index in range(epoch, loop.epochs):
        loop.train()
        loop.steps.append(
            loop.grower.step(
                lambda model: (model.eval()(X.double()).argmax(1) == Y).double()
            )
        )
        seed = loop.grower.hooks.sites["r0c0"].seed
        assert {p.dtype for p in seed.parameters()} == {torch.float64}, index
    assert loop.grower.kept
    network = loop.grower.finish()
    assert {p.dtype for p in network.parameters()} == {torch.float64}


def in_dtype_of_model(loop: Loop, x: torch.Tensor, y: torch.Tensor) -> None:
    plain(loop, x.to(loop.model.head.weight.dtype), y)


@pytest.mark.slow
def test_torch_fx_traces_a_finished_network() -> None:
    for path in ("body", "body.0", "head"):
        loop = Loop(sites={"r0c0": path}, model=net().eval()).run()
        assert loop.grower.kept
        network = loop.grower.finish().eval()
        traced = torch.fx.symbolic_trace(network)
        torch.testing.assert_close(traced(X), network(X))
        assert traced.state_dict().keys() == network.state_dict().keys()


EXPORTERS: dict[str, Any] = {
    "export": lambda model: torch.export.export(model, (X,)).module(),
    "trace": lambda model: torch.jit.trace(model, X),
}


@pytest.mark.parametrize("name", EXPORTERS)
def test_a_growing_model_is_not_exported_and_its_copy_is(name: str) -> None:
    """A trace would hold the seed as constants, or fail with words about these."""
    loop = Loop().run(6)
    model = loop.model.eval()
    copied = copy.deepcopy(model)
    with pytest.raises(
        ConfigError, match=r"seed in slot r0c0 grows: take copy\.deepcopy\(model\)"
    ):
        EXPORTERS[name](model)
    with torch.no_grad():
        torch.testing.assert_close(EXPORTERS[name](copied)(X), model(X))
    assert loop.run().grower.kept


@pytest.mark.parametrize(
    ("name", "epochs", "training"),
    [("trace", 0, False), ("trace", 1, True), ("export", 1, True)],
)
def test_a_vacant_model_is_traced_as_it_is_and_grows_on(
    name: str, epochs: int, training: bool
) -> None:
    alone = Loop(epochs=11).run()
    loop = Loop(epochs=11).run(epochs)
    model = loop.model.train(training)
    buffers = copy.deepcopy(dict(model.named_buffers()))
    traced = EXPORTERS[name](model)
    if not training:
        torch.testing.assert_close(traced(X), model(X))
    for key, value in model.named_buffers():
        value.copy_(buffers[key])  # a trace in training mode updates them
    loop.run()
    assert same(weights(loop.grower.finish()), weights(alone.grower.finish()))


def test_a_script_of_seeds_is_refused_with_what_works() -> None:
    loop = Loop().run(6)
    loop.model.eval()
    with pytest.raises(AttributeError, match=r"use torch\.export or torch\.jit\.trace"):
        torch.jit.script(loop.model)
    network = loop.run().grower.finish().eval()
    with pytest.raises(ConfigError, match=r"use torch\.export or torch\.jit\.trace"):
        torch.jit.script(network)
    torch.testing.assert_close(torch.jit.trace(network, X)(X), network(X))


def test_copies_are_quantized_and_pruned_before_and_while_a_model_grows() -> None:
    alone = Loop(epochs=11).run()
    loop = Loop(epochs=11).run(1)
    for _ in range(2):
        copied = copy.deepcopy(loop.model).eval()
        prune.l1_unstructured(copied.head, "weight", 0.5)
        assert (copied.head.weight == 0).sum() == copied.head.weight.numel() // 2
        prune.remove(copied.head, "weight")
        small = torch.ao.quantization.quantize_dynamic(copied, {nn.Linear}, torch.qint8)
        torch.testing.assert_close(small(X), copied(X), atol=0.3, rtol=0.1)
        assert not any(type(module) is nn.Linear for module in small.modules())
        loop.run(5)
    loop.run()
    assert same(weights(loop.grower.finish()), weights(alone.grower.finish()))


def test_a_network_whose_seeds_have_all_merged_is_scripted() -> None:
    loop = Loop(epochs=11, controller=script({**GROW, 0: plant("r0c0", "lora")})).run()
    network = loop.grower.finish(merge=True).eval()
    torch.testing.assert_close(torch.jit.script(network)(X), network(X))
