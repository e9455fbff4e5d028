"""Sites of a model in one's own loop that read a source: planted, kept, copied, saved, and merged."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import esper
from esper.core.action import Op
from esper.grower.grower import Grower
from esper.hosts.container import CONTAINER
from tests.grower.loops import (
    LENIENT,
    Loop,
    X,
    do,
    net,
    plant,
    same,
    script,
    shadowed,
    weights,
)

WIDEN = {"r2c0": "body.0 -> body.2"}
HEAD = {"r2c1": "body.2 -> head"}
LORA = {"r3c0": "body.2 -> body.2"}


def grows(slot: str, blueprint: str) -> Any:
    """Plants at the first decision, and keeps the seed at the tenth."""
    actions = {0: plant(slot, blueprint), 9: do(Op.FOSSILIZE, slot)}
    return script({**actions, **{number: do(Op.ADVANCE, slot) for number in (1, 4, 8)}})


KINDS = [(WIDEN, "widen_half"), (HEAD, "widen_whole"), (LORA, "lora_2")]


def loop_of(sites: dict[str, str], blueprint: str, **arguments: Any) -> Loop:
    return Loop(
        sites=sites, controller=grows(next(iter(sites)), blueprint), **arguments
    )


def outputs(model: nn.Module) -> Tensor:
    model.eval()
    with torch.no_grad():
        return model(X)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("sites", "blueprint", "step"),
    [(*KINDS[0], None), (*KINDS[1], shadowed), (*KINDS[2], None)],
)
def test_the_model_computes_the_same_bits_until_the_seed_is_on(
    sites: Any, blueprint: str, step: Any
) -> None:
    grown = loop_of(
        sites, blueprint, step=step, incubation="ste" if step is None else "shadow"
    ).run(4)
    alone = Loop(controller=None).run(4)
    assert grown.steps[-1].slots[next(iter(sites))].blueprint == blueprint
    assert same(weights(grown.model), weights(alone.model))


@pytest.mark.parametrize(("sites", "blueprint"), KINDS)
def test_a_kept_seed_stays_with_the_same_outputs(sites: Any, blueprint: str) -> None:
    loop = loop_of(sites, blueprint).run()
    wanted = outputs(loop.model)
    assert list(loop.grower.kept.values()) == [blueprint]
    model = loop.grower.finish()
    assert torch.equal(outputs(model), wanted)
    bare = net()
    bare.load_state_dict(
        {
            key: value
            for key, value in model.state_dict().items()
            if CONTAINER not in key
        }
    )
    assert not torch.allclose(outputs(bare), wanted), "the seed counts"


@pytest.mark.slow
@pytest.mark.parametrize(("sites", "blueprint"), KINDS[1:])
def test_a_finished_model_is_compiled_and_exported_as_others_are(
    sites: Any, blueprint: str
) -> None:
    loop = loop_of(sites, blueprint).run()
    model = loop.grower.finish().eval()
    wanted = outputs(model)
    exported = torch.export.export(model, (X,), strict=False).module()
    torch.testing.assert_close(exported(X), wanted)
    with torch.no_grad():
        torch.testing.assert_close(
            torch.compile(model, backend="eager", fullgraph=False)(X), wanted
        )


@pytest.mark.parametrize(("sites", "blueprint"), KINDS[:1])
def test_a_loop_goes_on_from_its_state(sites: Any, blueprint: str) -> None:
    whole = loop_of(sites, blueprint).run()
    first = loop_of(sites, blueprint).run(6)
    saved = copy.deepcopy(
        [
            first.grower.state_dict(),
            first.model.state_dict(),
            first.optimizer.state_dict(),
        ]
    )
    second = loop_of(sites, blueprint)
    second.grower.load_state_dict(saved[0])
    second.model.load_state_dict(saved[1])
    second.optimizer.load_state_dict(saved[2])
    second.epoch = 6
    second.run()
    assert same(weights(second.grower.finish()), weights(whole.grower.finish()))


class Around(nn.Module):
    """A model whose body's parts may be checkpointed."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.net, self.whole = net(), whole

    def forward(self, x: Tensor) -> Tensor:
        first, rest = self.net.body[0], self.net.body[1:]
        if self.whole:
            return self.net.head(checkpoint(self.net.body, x, use_reentrant=False))  # type: ignore[no-any-return]
        return self.net.head(rest(checkpoint(first, x, use_reentrant=False)))  # type: ignore[no-any-return]


def test_a_source_and_its_sink_are_run_again_together() -> None:
    sites = {"r2c0": "net.body.0 -> net.body.2"}
    loop = loop_of(sites, "widen_half", model=Around(whole=True)).run()
    plain = loop_of(WIDEN, "widen_half").run()
    pairs = zip(
        loop.grower.finish().parameters(),
        plain.grower.finish().parameters(),
        strict=True,
    )
    for (
        mine,
        other,
    ) in pairs:  # the statistics of a BatchNorm count a part that is run again twice
        torch.testing.assert_close(mine, other)


def test_blueprints_that_fit_nowhere_are_refused_at_the_first_step() -> None:
    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = (
                nn.Linear(8, 12),
                nn.LayerNorm(12),
                nn.Linear(12, 3),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.norm(self.first(x)))  # type: ignore[no-any-return]

    loop = Loop(sites={"r2c0": "first -> last"}, model=Between())
    with pytest.raises(
        esper.ConfigError, match="LayerNorm, in which units depend on each other"
    ):
        loop.run(1)


def test_a_seed_of_another_kind_of_site_is_refused_when_the_grower_is_made() -> None:
    model = net()
    config = LENIENT.with_values(env={"blueprints": ("mlp_small",)})
    with pytest.raises(
        esper.ConfigError,
        match=r"'mlp_small' .*r2c0: the site has a source.*widen_half",
    ):
        Grower(
            model,
            WIDEN,
            torch.optim.SGD(model.parameters(), 0.1),
            topology="mlp",
            config=config,
        )


@pytest.mark.parametrize("kept", [False, True])
def test_the_last_layer_of_a_sequential_is_widened_though_seeds_are_registered_in_it(
    kept: bool,
) -> None:
    """Also in a second growth, after which seeds of the first one are its submodules."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 12), nn.ReLU()), nn.Linear(12, 3))
    for blueprint in ["widen_half", "widen_quarter"][: 1 + kept]:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        controller = script({0: plant("r2c0", blueprint)})
        grower = esper.Grower(
            model, "auto", optimizer, controller, horizon=4, example=X[:4]
        )
        grower.start(lambda network: float(network.eval()(X).mean()))
        assert list(grower.kept.values()) == [blueprint]
        grower.finish()
    assert sum(p.numel() for p in model.parameters()) == 147 + (12 * 6) + kept * (
        12 * 3
    )
