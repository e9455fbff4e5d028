"""Grafted hosts: slots on the outputs of a user's submodules, with all features of Esper's hosts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.config import ConfigError
from esper.core.place import Features
from esper.hosts.graft import GraftedHost, graft
from esper.hosts.inputs import Arguments

X = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
SITES = {"r0c0": "first.1", "r0c1": "second"}


class Small(nn.Module):
    """Two blocks; the layer after the first one overwrites its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(inplace=True)
        )
        self.second = nn.Conv2d(3, 5, 3, padding=1)
        self.head = nn.Linear(5, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu_(self.second(self.first(x))).mean((2, 3)))  # type: ignore[no-any-return]


def small() -> Small:
    torch.manual_seed(3)
    return Small()


def seen(
    host: GraftedHost, walk: Callable[[Any], Tensor]
) -> tuple[list[tuple[int, tuple[int, ...]]], Tensor]:
    calls = []

    def at(site: int, here: Features) -> Tensor:
        h = here.h
        calls.append((site, tuple(h.shape)))
        return h

    return calls, walk(at)


def test_the_host_alone_is_the_model() -> None:
    host = graft(small(), SITES, example=X)
    assert torch.equal(host.eval()(X), small().eval()(X))
    assert [(site.name, site.channels) for site in host.sites] == [
        ("r0c0", 3),
        ("r0c1", 5),
    ]
    calls, logits = seen(host, lambda at: host.forward_with_hook(X, at))
    assert calls == [(0, (4, 3, 8, 8)), (1, (4, 5, 8, 8))]
    assert torch.equal(logits, host(X))


def test_sites_are_in_the_order_in_which_they_run_whatever_their_names() -> None:
    host = graft(small(), {"r0c0": "second", "r0c1": "first"}, example=X)
    assert [site.name for site in host.sites] == ["r0c1", "r0c0"]
    assert host.slot_names == ("r0c0", "r0c1")


def test_nothing_is_added_to_the_model() -> None:
    model = small()
    host = graft(model, SITES, example=X)
    host(X)
    assert host.model is model
    assert model.state_dict().keys() == Small().state_dict().keys()
    assert all(not module._forward_hooks for module in model.modules())
    model.load_state_dict(small().state_dict())
    twin = copy.deepcopy(host)
    assert torch.equal(twin.eval()(X), host.eval()(X))
    assert {id(p) for p in twin.parameters()}.isdisjoint(
        {id(p) for p in host.parameters()}
    )


class Skipping(nn.Module):
    """A residual network whose second site lies inside the branch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.branch, self.head = (
            nn.Linear(4, 4),
            nn.Linear(4, 4),
            nn.Linear(4, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.head(h + self.branch(h))  # type: ignore[no-any-return]


@pytest.mark.parametrize("vacant", [(), (1,)])
def test_what_passes_by_a_site_has_the_seeds_before_it(vacant: tuple[int, ...]) -> None:
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    host = graft(Skipping(), {"r0c0": "first", "r0c1": "branch"}, "mlp", example=x)
    kept: dict[int, Features] = {}

    def add(site: int, here: Features) -> Tensor:
        kept[site] = here
        return here.h + 1 if site == 0 else here.h

    with torch.no_grad():
        wanted = host.forward_with_hook(x, add)
        assert torch.equal(host.forward_from(x, 1, kept[1], add, vacant), wanted)
        assert not torch.equal(host(x), wanted)


def test_forward_from_gives_no_gradient_to_earlier_layers() -> None:
    host = graft(small(), SITES, example=X)
    h = torch.randn(4, 3, 8, 8, requires_grad=True)
    host.forward_from(
        X, 0, Features.at_sink(h * 1), lambda _site, at: at.h
    ).sum().backward()
    assert h.grad is not None
    assert host.get_submodule("model.first.0").weight.grad is None
    assert host.get_submodule("model.second").weight.grad is not None
    assert torch.is_grad_enabled()


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Conv2d(1, 1, 3, padding=1)
        self.unused = nn.Conv2d(1, 1, 1)
        self.pair, self.named = Pair(), Named()
        self.pooled = nn.AdaptiveAvgPool2d(1)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.pair(self.named(self.shared(self.shared(x)))["h"])
        return (self.pooled(a) + b).flatten(1)  # type: ignore[no-any-return]


class Named(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"h": x}


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x.mean((2, 3), keepdim=True)


@pytest.mark.parametrize(
    ("sites", "topology", "words"),
    [
        (
            {"r0c0": "nowhere"},
            "cnn",
            "no submodule 'nowhere'; it has: shared, unused, pair, named, pooled",
        ),
        ({"r0c0": "shared"}, "cnn", "slot r0c0: shared runs more than once"),
        (
            {"r0c0": "unused"},
            "cnn",
            r"never runs the submodule of slot r0c0 \(unused\)",
        ),
        (
            {"r0c0": "named"},
            "cnn",
            "named returns dict; a site is one tensor, or the first of a tuple",
        ),
        (
            {"r0c0": "pooled"},
            "transformer",
            "transformer seeds need floating-point features with 3 dimensions",
        ),
        ({"first": "pooled"}, "cnn", "slot name 'first' is not of the form r0c0"),
        (
            {"r0c0": "pooled"},
            "rnn",
            "unknown topology 'rnn'; known: cnn, cnn1d, cnn3d, transformer, encoder, mlp",
        ),
        ({"r0c0": "pooled", "r0c1": "pooled"}, "cnn", "each on its own submodule"),
        ({}, "cnn", "one or more slots"),
    ],
)
def test_a_site_that_cannot_hold_a_slot_is_refused(
    sites: dict[str, str], topology: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        graft(Twice(), sites, topology, example=X)


def test_a_probe_changes_no_buffer_and_no_mode() -> None:
    model = small()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    graft(model, SITES, example=X + 3)
    assert model.training
    assert all(
        torch.equal(before[name], tensor) for name, tensor in model.state_dict().items()
    )


class Reader(nn.Module):
    """Tokens and their mask [B, T] to logits, in an object as Hugging Face's models return it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.gru = nn.GRU(6, 6, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, tokens: Tensor, mask: Tensor) -> SimpleNamespace:
        h, last = self.gru(self.embed(tokens) * mask[:, :, None])
        return SimpleNamespace(logits=self.head(h.sum(1) + last[0]), loss=None)


def test_a_site_on_a_recurrent_layer_is_its_first_tensor_and_inputs_may_be_several() -> (
    None
):
    torch.manual_seed(0)
    model = Reader()
    x = {"tokens": torch.randint(0, 9, (4, 5)), "mask": torch.rand(4, 5)}
    host = graft(model, {"r0c0": "gru"}, "transformer", example=x)
    assert [site.channels for site in host.sites] == [6]
    assert torch.equal(host(**x), model(**x).logits)
    assert torch.equal(host(tuple(x.values())), host(x))

    def change(_site: int, here: Features) -> Tensor:
        h = here.h
        assert h.shape == (4, 5, 6)
        return h + 1

    changed = host.forward_with_hook(Arguments(x), change)
    h, last = model.gru(model.embed(x["tokens"]) * x["mask"][:, :, None])
    assert torch.equal(changed, model.head((h + 1).sum(1) + last[0]))
    assert torch.equal(
        host.forward_from(
            Arguments(x), 0, Features.at_sink(h + 1), lambda _site, at: at.h
        ),
        changed,
    )
