"""The end of growth: kept seeds become parts of the model and its averages, or of the layers and the optimizer."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import esper
from esper.config import ConfigError
from esper.core.action import Op
from esper.core.blueprints import BLUEPRINTS
from esper.core.place import Place
from esper.grower.merging import merge_in_loop
from esper.hosts.container import network_of
from esper.hosts.seed_hook import hooks_of
from tests.grower.loops import GROWS, LENIENT, Loop, X, Y, do, net, plant, script
from tests.grower.test_sources import KINDS, LORA, WIDEN, loop_of, outputs


def test_an_average_is_given_with_its_wrapper_or_as_a_copy() -> None:
    model = net()
    average, copied = AveragedModel(model), copy.deepcopy(model)
    assert network_of(average, model) is average.module
    assert network_of(copied, model) is copied
    with pytest.raises(ConfigError, match="parameters are not those of the model"):
        network_of(nn.Linear(2, 2), model)


@pytest.mark.parametrize("replaced", ["model", "average"])
def test_a_submodule_that_was_replaced_with_its_kept_seed_is_named(
    replaced: str,
) -> None:
    model = net()
    average = AveragedModel(model)
    loop = Loop(model=model, averages=[average]).run()
    network = {"model": model, "average": average.module}[replaced]
    former = network.body[0]
    network.body[0] = nn.Linear(8, 12)
    with pytest.raises(RuntimeError, match=r"slot r0c0 \(body\.0\) was replaced"):
        loop.grower.finish()
    network.body[0] = former
    loop.grower.finish()
    assert len(list(hooks_of(network))) == 1


def test_an_average_that_lacks_a_kept_seed_is_said_at_the_end() -> None:
    loop = Loop().run(1)
    average, followed = AveragedModel(loop.model), AveragedModel(loop.model)
    loop.grower.follow(followed)
    loop.run()
    with pytest.warns(UserWarning, match=r"no seed in slot r0c0: .*grower\.follow\(\)"):
        loop.grower.finish()
    assert not next(iter(hooks_of(average.module)))[2].seed
    assert len(list(hooks_of(followed.module))) == 1


def test_a_model_that_cannot_run_on_its_last_batch_is_finished_with_a_warning_and_not_merged() -> (
    None
):
    class TrainsOnly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.wanted = net(), True

        def forward(self, x: Any) -> Any:
            if not self.training and not self.wanted:
                raise RuntimeError("it has no eval mode")
            return self.net(x)

    model = TrainsOnly()
    loop = Loop(
        model=model,
        controller=GROWS,
        sites={"r0c0": "net.body.0", "r0c1": "net.body.2"},
    ).run()
    model.wanted = False
    with pytest.warns(UserWarning, match="cannot run on its last batch"):
        loop.grower.finish(merge=True)
    assert [hook.name for _, _, hook in hooks_of(model)] == ["r0c0"], (
        "it stays as it is"
    )


@pytest.mark.parametrize(("sites", "blueprint"), KINDS[::2])
def test_a_merged_model_has_no_trace_of_the_seed_and_trains_on(
    sites: Any, blueprint: str
) -> None:
    loop = loop_of(sites, blueprint).run()
    wanted = outputs(loop.model)
    model = loop.grower.finish(merge=True)
    torch.testing.assert_close(outputs(model), wanted)
    assert type(model) is type(net())
    assert not list(hooks_of(model))
    assert not any(
        name.startswith("esper.")
        for name in {type(m).__module__ for m in model.modules()}
    )
    assert [
        id(p) for group in loop.optimizer.param_groups for p in group["params"]
    ] == list(map(id, model.parameters()))
    assert all(
        loop.optimizer.state[p]["momentum_buffer"].shape == p.shape
        for p in model.parameters()
    )
    esper.plain(model, X)
    loop.grower = None
    loop.epochs += 2
    loop.run()
    assert not torch.allclose(outputs(model), wanted)


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.001, momentum=0.5),
}


class Double(nn.Module):
    """A network in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net().double()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.double())  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("name", "site", "blueprint"),
    [
        ("SGD", "body.0 -> body.2", "widen_half"),
        ("RMSprop", "body.2 -> head", "widen_whole"),
    ],
)
def test_a_merged_loop_trains_as_the_network_with_the_seed_beside_it(
    site: str, blueprint: str, name: str
) -> None:
    path = site.replace("body", "net.body").replace("head", "net.head")
    config = LENIENT.with_values(task={"max_grad_norm": 1e9})
    loop = loop_of(
        {"r2c0": path},
        blueprint,
        model=Double(),
        make_optimizer=OPTIMIZERS[name],
        config=config,
    ).run()
    beside = loop_of(
        {"r2c0": path},
        blueprint,
        model=Double(),
        make_optimizer=OPTIMIZERS[name],
        config=config,
    ).run()
    loop.grower.finish(merge=True)
    beside.grower.finish()
    for each in (loop, beside):
        each.grower, each.epochs = None, each.epochs + 3
        each.run()
    torch.testing.assert_close(
        outputs(loop.model), outputs(beside.model), rtol=1e-9, atol=1e-9
    )


def test_moments_of_a_seed_that_is_partly_on_are_those_of_larger_weights() -> None:
    """At alpha 0.5 the merged weights are half of the seed's, and the gradients for them are twice as large."""
    loop = loop_of(
        WIDEN, "widen_half", make_optimizer=lambda p: torch.optim.AdamW(p, 0.01)
    ).run()
    model, state = loop.model, loop.optimizer.state
    loop.grower.finish()
    ((_, _, hook),) = hooks_of(model)
    hook.alpha = 0.5
    last = list(hook.seed.parameters())[-1]
    weights, moments = last.detach().clone(), dict(state[last])
    steps = float(moments["step"]), float(state[model.body[2].weight]["step"])
    assert merge_in_loop(model, loop.optimizer, lambda: None) == {}
    merged: Any = model.body[2].weight
    torch.testing.assert_close(merged[:, 12:], 0.5 * weights)
    for key, wanted, beta in (("exp_avg", 2.0, 0.9), ("exp_avg_sq", 4.0, 0.999)):
        wanted *= (1 - beta ** steps[1]) / (1 - beta ** steps[0])
        torch.testing.assert_close(
            state[merged][key][:, 12:], wanted * moments[key].reshape(12, -1)
        )


@pytest.mark.parametrize("residual", ["mlp_small", "lora"])
def test_a_seed_inside_a_widening_keeps_its_units_when_both_are_merged(
    residual: str, tmp_path: Any
) -> None:
    sites = {"r2c0": "body.0 -> body.2", "r0c0": "body.0"}
    actions = {
        1: plant("r2c0", "widen_half"),
        2: plant("r0c0", residual),
        3: do(Op.ADVANCE, "r0c0"),
        6: do(Op.ADVANCE, "r0c0"),
        10: do(Op.ADVANCE, "r0c0"),
        11: do(Op.FOSSILIZE, "r0c0"),
    }
    loop = Loop(
        sites=sites,
        controller=script(actions),
        config=LENIENT.with_values(env={"at_once": True}),
        epochs=16,
    ).run()
    assert loop.grower.kept == {"r2c0": "widen_half", "r0c0": residual}
    wanted = outputs(loop.model)
    if residual == "lora":  # it becomes a part of the layer, too
        model = loop.grower.finish(merge=True)
        assert not list(hooks_of(model))
    else:
        with pytest.warns(UserWarning, match="not merged and stay modules: body.0"):
            model = loop.grower.finish(merge=True)
    assert model.body[0].out_features == 18
    torch.testing.assert_close(outputs(model), wanted)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    torch.testing.assert_close(outputs(loaded), wanted)
    torch.testing.assert_close(outputs(esper.plain(model, X)), wanted)
    loop.grower, loop.epochs = None, loop.epochs + 1
    loop.run()


def whole_batch(loop: Loop, _x: Tensor, _y: Tensor) -> None:
    """A step on all samples, whose gradient hardly changes from step to step."""
    loop.optimizer.zero_grad()
    nn.functional.cross_entropy(loop.model(X), Y).backward()
    loop.optimizer.step()


@pytest.mark.parametrize("late", [2, 11])
def test_the_update_after_a_merge_is_that_of_the_seed_beside_its_layers(
    late: int,
) -> None:
    """Its averages are of fewer steps than those of its layers, and AdamW corrects all of a layer by one count."""
    updates = []
    for merges in (True, False):
        loop = Loop(
            lambda p: torch.optim.AdamW(p, 1e-5, weight_decay=0.0),
            sites=WIDEN,
            controller=script({late: plant("r2c0", "widen_half")}),
            config=LENIENT.with_values(env={"at_once": True}),
            step=whole_batch,
        ).run()
        model = loop.grower.finish(merge=merges)
        loop.grower = None

        def units(model: Any = model, merges: bool = merges) -> list[Tensor]:
            if merges:
                first, last = model.body[0], model.body[2]
                parts = [first.weight[12:], first.bias[12:], last.weight[:, 12:]]
            else:
                first, _, last = next(iter(hooks_of(model)))[2].seed.body
                parts = [first.weight, first.bias, last.weight]
            return [part.detach().clone() for part in parts]

        before = units()
        whole_batch(loop, X, Y)
        updates.append(
            [after - start for after, start in zip(units(), before, strict=True)]
        )
    for merged, beside in zip(*updates, strict=True):
        assert beside.abs().max() > 0
        torch.testing.assert_close(merged, beside, rtol=0.1, atol=1e-7)


@pytest.mark.parametrize(("sites", "blueprint"), KINDS[::2])
def test_other_state_of_changed_layers_starts_anew(sites: Any, blueprint: str) -> None:
    """An average of weights, as ASGD has, is not that of the merged weights."""
    loop = loop_of(
        sites, blueprint, make_optimizer=lambda p: torch.optim.ASGD(p, 0.05)
    ).run()
    before = {name: p.detach().clone() for name, p in loop.model.named_parameters()}
    model = loop.grower.finish(merge=True)
    for name, p in model.named_parameters():
        stays = p.shape == before[name].shape and torch.equal(p, before[name])
        assert ("ax" in loop.optimizer.state[p]) == stays, name
    loop.grower = None
    loop.epochs += 1
    loop.run()


def test_a_site_that_has_grown_twice_is_merged_twice() -> None:
    loop = loop_of(LORA, "lora_2").run()
    loop.grower.finish()
    again = loop_of(LORA, "lora_2", model=loop.model).run()
    wanted = outputs(again.model)
    assert len(list(hooks_of(again.model))) == 2
    model = again.grower.finish(merge=True)
    assert not list(hooks_of(model))
    torch.testing.assert_close(outputs(model), wanted)


def test_a_blueprint_of_ones_own_between_two_layers_stays_a_module() -> None:
    registry = BLUEPRINTS.copy()

    @registry.register(
        "mlp",
        "path",
        parameters=lambda place: 4 * (8 + place.channels),
        reads_source=True,
    )
    def path(place: Place) -> nn.Module:
        down = nn.Linear(8, 4, bias=False)
        up = nn.Linear(4, place.channels, bias=False)
        return nn.Sequential(down, nn.GELU(), up)

    loop = loop_of(WIDEN, "path", blueprints=registry).run()
    wanted = outputs(loop.model)
    with pytest.warns(
        UserWarning,
        match=r"body\.0 -> body\.2: only widen_quarter, .* are merged into layers, not path",
    ):
        model = loop.grower.finish(merge=True)
    assert torch.equal(outputs(model), wanted)


def test_growth_ends_before_it_warns_of_seeds_that_stay() -> None:
    """Warnings may be errors, and the merge is made by then."""
    loop = Loop().run()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="stay modules"):
            loop.grower.finish(merge=True)
    assert loop.grower.groups.closed
    assert loop.grower.record.summary.parameters > sum(
        p.numel() for p in net().parameters()
    )
