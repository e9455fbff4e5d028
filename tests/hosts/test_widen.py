"""Seeds that read a source become units and weights of their host's layers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import esper
from esper.core.blueprints import BLUEPRINTS
from esper.files.grown_host import assemble
from esper.hosts.cnn import CNNHost
from esper.hosts.graft import graft
from esper.hosts.grown import GrownHost, KeptSeed
from esper.hosts.host import Host
from esper.hosts.transformer import TransformerHost
from tests.hosts.grown_modules import without_esper

IMAGES = torch.randn(6, 1, 12, 12)


class Net(nn.Module):
    """A network as a user writes it, with functions between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm, self.conv2 = (
            nn.Conv2d(1, 4, 3),
            nn.BatchNorm2d(4),
            nn.Conv2d(4, 8, 3),
        )
        self.fc1, self.fc2 = nn.Linear(8 * 16, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv1(x)))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(
            F.dropout(F.gelu(self.fc1(torch.flatten(x, 1))), 0.5, self.training)
        )  # type: ignore[no-any-return]


SITES = {
    "r2c0": "conv1 -> conv2",
    "r2c1": "conv2 -> fc1",
    "r2c2": "fc1 -> fc2",
    "r3c0": "conv2 -> conv2",
}

HOSTS: dict[str, tuple[Callable[[], Host], tuple[str, ...], Tensor]] = {
    "one widening": (lambda: CNNHost(1, 10, base=3, blocks=2), ("r2c0",), IMAGES),
    "all in a row": (
        lambda: CNNHost(1, 10, base=3, blocks=3, rows=1),
        ("r2c0", "r2c1", "r2c2"),
        IMAGES,
    ),
    "fused": (lambda: CNNHost(1, 10, base=8, blocks=2), ("r2c0", "r2c1"), IMAGES),
    "text": (
        lambda: TransformerHost(11, 8, layers=2, heads=2, block=6, slots=2),
        ("r1c0", "r2c0", "r1c1", "r3c1"),
        torch.randint(0, 11, (4, 6)),
    ),
    "grafted": (lambda: graft(Net(), SITES, example=IMAGES), tuple(SITES), IMAGES),
    "grafted, one": (
        lambda: graft(Net(), {"r2c1": "conv2 -> fc1"}, example=IMAGES),
        ("r2c1",),
        IMAGES,
    ),
}


def grown(kind: str, residual: str = "") -> tuple[GrownHost, Tensor]:
    """A host with trained seeds in these slots, in float64, and inputs."""
    torch.manual_seed(0)
    make, slots, x = HOSTS[kind]
    host = make()
    host.use_slots((*slots, residual) if residual else slots)
    places = {place.name: place for place in host.sites}
    names = {
        name: BLUEPRINTS.names(host.topology, [place])[-1]
        for name, place in places.items()
    }
    kept = {
        name: KeptSeed(blueprint, "LINEAR_ADD", 0.75)
        for name, blueprint in names.items()
    }
    network = assemble(
        host,
        kept,
        {
            name: BLUEPRINTS.at(host.topology, places[name], b)
            for name, b in names.items()
        },
        "t",
    )
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.3)
    network.double()
    x = x if kind == "text" else x.double()
    network.train()
    for _ in range(3):
        network(x)  # statistics of batches
    return network.eval(), x


@pytest.mark.parametrize("kind", HOSTS)
def test_a_merged_network_computes_the_same_with_nothing_of_esper_in_it(
    kind: str,
) -> None:
    network, x = grown(kind)
    wanted = network(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is left over
        merged = esper.plain(network, x if kind != "text" else (x,), merge=True)
    torch.testing.assert_close(merged(x), wanted, rtol=1e-6, atol=1e-6)
    assert without_esper(merged)
    assert not any("seeds" in name for name, _ in merged.named_parameters())
    assert torch.equal(network(x), wanted)  # the network itself is as it was


@pytest.mark.parametrize(
    "kind", ["one widening", "all in a row", "fused", "grafted", "grafted, one"]
)
def test_units_that_never_trained_add_nothing_and_all_learn_in_the_first_step(
    kind: str,
) -> None:
    network, x = grown(kind)
    for name, seed in network.seeds.items():
        if network.kept[name].blueprint.startswith("widen"):
            *_, last = seed.get_submodule("body").children()
            nn.init.zeros_(last.get_parameter("weight"))
    before = {name: len(p) for name, p in network.host.named_parameters()}
    wanted = network(x)
    draws = torch.get_rng_state()
    merged = esper.plain(network, x, merge=True)
    assert torch.equal(torch.get_rng_state(), draws)
    torch.testing.assert_close(merged(x), wanted, rtol=1e-6, atol=1e-6)
    F.cross_entropy(merged(x), torch.arange(6)).backward()
    widened = 0
    for (name, units), new in zip(before.items(), merged.parameters(), strict=True):
        if new.dim() < 2 or len(new) == units:
            continue
        widened += 1
        assert new.grad is not None
        learns = new.grad[units:].flatten(1).any(dim=1)
        assert learns.float().mean() >= 0.5, name  # a ReLU may be dead for six samples
        # Both units of a pair read the same, and part in the first step.
        half = len(learns) // 2
        assert torch.equal(new[units : units + half], new[units + half :][:half])
        assert not torch.allclose(
            new.grad[units : units + half], new.grad[units + half :][:half]
        )
    assert widened


def test_weights_between_two_widenings_are_zero_and_learn() -> None:
    network, x = grown("all in a row")
    merged = esper.plain(network, x, merge=True)
    weight = next(p for p in merged.parameters() if p.dim() == 4 and p.shape[1] == 6)
    assert torch.count_nonzero(weight[6:, 3:]) == 0
    assert torch.count_nonzero(weight[:6, 3:]) > 0
    F.cross_entropy(merged.train()(x), torch.arange(6)).backward()
    assert weight.grad is not None
    assert torch.count_nonzero(weight.grad[6:, 3:]) > 0


def test_a_kept_seed_between_the_layers_of_a_widening_keeps_its_channels() -> None:
    network, x = grown("one widening", residual="r0c0")
    with pytest.warns(UserWarning, match="not merged and stay modules: r0c0: its host"):
        merged = esper.plain(network, x, merge=True)
    torch.testing.assert_close(merged(x), network(x), rtol=1e-6, atol=1e-6)
    assert max(p.shape[0] for p in merged.parameters() if p.dim() == 4) == 6
    names = [name for name, _ in merged.named_parameters() if "seeds" in name]
    assert names, "the seed is there"


def test_units_that_something_else_reads_keep_a_widening_apart_and_nothing_changes() -> (
    None
):
    class Reads(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.conv1.weight.shape[0]

    host = graft(Reads(), {"r2c0": "conv1 -> conv2"}, example=IMAGES)
    kept = {"r2c0": KeptSeed("widen_whole", "LINEAR_ADD", 1.0)}
    network = assemble(
        host, kept, {"r2c0": BLUEPRINTS.get("cnn", "widen_whole")}, "t"
    ).eval()
    nn.init.normal_(network.seeds["r2c0"].get_submodule("body.3").weight)  # type: ignore[arg-type]
    before = copy.deepcopy(network)
    with pytest.raises(
        esper.ConfigError, match=r"r2c0: .*something else uses the units of its layers"
    ):
        esper.plain(network, IMAGES, merge=True)
    assert torch.equal(network(IMAGES), before(IMAGES))


def test_without_merge_a_seed_of_a_grafted_network_that_reads_a_source_is_refused() -> (
    None
):
    network, x = grown("grafted, one")
    with pytest.raises(
        esper.ConfigError, match=r"slot r2c1: .*conv2 -> fc1.*pass merge=True"
    ):
        esper.plain(network, x)
