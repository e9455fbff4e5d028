"""Parts of grown networks, modules around them, and networks with a state or in another dtype are made plain."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import esper
from esper.core.ramps import BlendOperator
from esper.core.site import guard_group_norm
from esper.hosts.cnn import CNNHost
from esper.hosts.graft import graft
from esper.hosts.grown import GrownHost, KeptSeed
from tests.hosts.grown_modules import grown, require_same, seed_of, without_esper

X8 = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))


class Ensemble(nn.Module):
    """Two networks that have grown by themselves, with slots of the same name."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        self.a = grown(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), "0", seed_of(first))
        self.b = grown(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), "0", seed_of(second))

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x)  # type: ignore[no-any-return]


def test_networks_that_have_grown_by_themselves_are_made_plain_together() -> None:
    network = Ensemble("mlp_small", "norm")
    plain = esper.plain(network, X8)
    assert without_esper(plain)
    assert list(plain.state_dict()) == list(network.state_dict())
    require_same(network, plain, X8)
    merged = esper.plain(Ensemble("lora", "lora"), X8, merge=True)
    assert len(list(merged.parameters())) == 4


def test_a_part_of_a_network_has_its_seeds_among_its_parameters() -> None:
    network: Any = grown(
        nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 3)),
        "0.0",
        SMALL,
    )
    plain = esper.plain(network[0], X8)
    assert len(list(plain.parameters())) == 2 + len(list(SMALL.parameters()))
    require_same(network[0], plain, X8)
    assert len(list(esper.plain(network[1], X8).parameters())) == 2


SMALL = seed_of("mlp_small")


def test_a_module_around_a_grown_host_is_made_plain() -> None:
    host = graft(
        nn.Sequential(nn.Linear(8, 8), nn.ReLU()),
        {"r0c0": "0"},
        topology="mlp",
        example=X8,
    )
    kept = {"r0c0": KeptSeed("lora", "LINEAR_ADD", 0.5)}
    images = torch.randn(2, 1, 8, 8)
    for network, x in (
        (
            nn.Sequential(
                GrownHost(host, {"r0c0": seed_of("lora")}, kept, "t"), nn.Linear(8, 3)
            ),
            X8,
        ),
        (nn.Sequential(host, nn.Linear(8, 3)), X8),
        (nn.Sequential(CNNHost(1, 10, base=8, blocks=2), nn.Linear(10, 2)), images),
        (CNNHost(1, 10, base=8, blocks=2), images),
        (host, X8),
    ):
        plain = esper.plain(network, x)
        assert without_esper(plain)
        require_same(network, plain, x)


@pytest.mark.parametrize(
    ("dtype", "operator"),
    list(
        zip((torch.bfloat16, torch.float64, torch.bfloat16), BlendOperator, strict=True)
    ),
)
def test_a_grown_network_and_its_copy_can_be_turned_into_another_dtype(
    dtype: torch.dtype, operator: BlendOperator
) -> None:
    torch.manual_seed(0)
    network = grown(
        nn.Sequential(nn.Linear(8, 8), nn.ReLU()),
        "0",
        seed_of("mlp_small", operator=operator),
    ).eval()
    wanted = network(X8)
    plain = esper.plain(network, X8).to(dtype)
    turned = network.to(dtype)
    for each in (plain, turned, esper.plain(turned, X8.to(dtype))):
        found = each(X8.to(dtype))
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), wanted, rtol=0.05, atol=0.05)


class Auxiliary(nn.Module):
    """A second output in training, as torchvision's GoogLeNet has one."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.aux = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        return (self.main(x), self.aux(x)) if self.training else self.main(x)


def test_a_submodule_that_runs_in_training_only_keeps_its_seed() -> None:
    network = grown(Auxiliary(), "aux", seed_of("mlp_small"))
    plain = esper.plain(network, X8)
    torch.testing.assert_close(plain.train()(X8)[1], network.train()(X8)[1])


class Keeps(nn.Module):
    """Keeps its last output, which has a graph, as recurrent networks keep their state, and counts its passes."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.state = nn.Linear(8, 8), (torch.zeros(5, 8),)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.passes.add_(1)  # type: ignore[operator]
        self.state = (self.encode(x) * self.passes + self.state[0],)
        return self.state[0]


def test_a_network_with_a_state_stays_as_it_is() -> None:
    network: Any = grown(Keeps(), "encode", seed_of("mlp_small"))
    kept = network(X8)
    plain: Any = esper.plain(network, X8)
    assert float(network.passes) == float(plain.passes) == 1
    assert network.state[0] is kept
    torch.testing.assert_close(plain(X8), network(X8))


def test_what_torch_notes_of_removed_hooks_goes_too() -> None:
    """Otherwise a hook that gets the same number in another process would be called with other arguments."""
    seed = seed_of("conv_small", "cnn")
    guard_group_norm(seed)
    plain = esper.plain(
        grown(nn.Sequential(nn.Identity()), "0", seed), torch.randn(2, 8, 4, 4)
    )
    assert not any(module._forward_pre_hooks_with_kwargs for module in plain.modules())
