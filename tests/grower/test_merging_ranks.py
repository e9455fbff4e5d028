"""Ranks of frozen layers of a model in a loop, which grow as LoRAs merge."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from esper.core.blueprints.adapted import Adapted, rank_of
from tests.grower.loops import Loop, X, Y, net, plant, same, weights
from tests.grower.test_merging import (
    OPTIMIZERS,
    merging,
    resumed,
    saved_of,
    whole_batch,
)
from tests.grower.test_sources import outputs
from tests.hosts.grown_modules import KINDS, Kind, linear


def frozen_net(kind: Kind = linear) -> nn.Module:
    """Only the last layer learns."""
    model = net()
    model.body[2] = kind(model.body[2])
    model.body.requires_grad_(False)
    return model


def raising(kind: Kind = linear, **arguments: Any) -> Loop:
    """The rank of a frozen layer grows three times."""
    actions = {number: plant("r3c0", "lora_2") for number in (1, 3, 5)}
    return merging(
        actions,
        {"r3c0": "body.2 -> body.2"},
        model=frozen_net(kind),
        epochs=8,
        **arguments,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_the_rank_of_a_frozen_layer_grows(name: str, kind: Kind) -> None:
    loop = raising(kind, make_optimizer=OPTIMIZERS[name])
    first = weights(loop.model)
    loop.run()
    layer = loop.model.body[2]
    assert isinstance(layer, Adapted)
    assert loop.grower.merged == {"r3c0": ("lora_2",) * 3}
    assert rank_of(layer) == 6
    after = weights(loop.model)
    frozen = [key for key in first if key.startswith("body") and "running" not in key]
    assert all(
        torch.equal(after[key], first[key]) for key in frozen if "num" not in key
    )
    groups = loop.optimizer.param_groups
    adapter = list(layer.adapter.parameters())
    assert all(sum(p is q for g in groups for q in g["params"]) == 1 for p in adapter)
    assert layer.adapter[1].weight.abs().amax(dim=0).min() > 0, "all ranks learn"
    wanted = outputs(loop.model)
    model = loop.grower.finish(merge=True)
    assert type(model.body[2]) is type(frozen_net(kind).body[2])
    torch.testing.assert_close(outputs(model), wanted)
    held = {p for group in groups for p in group["params"]}
    assert held.isdisjoint(adapter)


@pytest.mark.parametrize(
    ("name", "epochs", "kind"),
    [("SGD", 3, KINDS[0]), ("AdamW", 5, KINDS[-1])],
)
def test_a_loop_whose_ranks_have_grown_goes_on_from_its_state(
    name: str, epochs: int, kind: Kind
) -> None:
    make_optimizer = OPTIMIZERS[name]
    whole = raising(kind, make_optimizer=make_optimizer).run()
    first = raising(kind, make_optimizer=make_optimizer).run(epochs)
    new = raising(kind, make_optimizer=make_optimizer)
    again = resumed(saved_of(first), epochs, new)
    again.run()
    assert same(weights(again.model), weights(whole.model))


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_ranks_go_on_with_the_state_of_their_seed(
    kind: Kind,
) -> None:
    updates = []
    for merge in (True, False):
        loop = merging(
            {1: plant("r3c0", "lora_2")},
            {"r3c0": "body.2 -> body.2"},
            make_optimizer=OPTIMIZERS["AdamW"],
            model=frozen_net(kind),
            step=whole_batch,
            merge=merge,
            epochs=6,
        ).run(3)
        whole_batch(loop, X, Y)
        updates.append(outputs(loop.model))
        assert bool(loop.grower.merged) is merge
    torch.testing.assert_close(updates[0], updates[1])
