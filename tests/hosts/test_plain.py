"""A grown network without Esper: the same outputs, from modules that need none of its classes."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import esper
from esper.config import ConfigError
from esper.core.blend import Seed
from esper.core.blueprints import BLUEPRINTS
from esper.core.ramps import BlendOperator
from esper.files.grown_host import assemble
from esper.hosts.cnn import CNNHost
from esper.hosts.graft import graft
from esper.hosts.grown import GrownHost, KeptSeed
from esper.hosts.host import Host
from esper.hosts.seed_hook import hooks_of
from esper.hosts.transformer import TransformerHost
from tests.grower.loops import Loop
from tests.hosts.grown_modules import grown, require_same, seed_of, without_esper

SHAPES = {
    "cnn": (2, 8, 5, 5),
    "transformer": (2, 7, 8),
    "encoder": (2, 7, 8),
    "mlp": (2, 8),
}


@pytest.mark.parametrize("topology", SHAPES)
@pytest.mark.parametrize("operator", BlendOperator)
def test_every_seed_computes_the_same_without_esper(
    topology: str, operator: BlendOperator
) -> None:
    torch.manual_seed(0)
    for name in BLUEPRINTS.names(topology):
        network = grown(
            nn.Sequential(nn.Identity(), nn.Identity()),
            "0",
            seed_of(name, topology, operator),
        )
        x = torch.randn(SHAPES[topology])
        plain = esper.plain(network, x)
        assert without_esper(plain)
        assert not without_esper(network)
        require_same(network, plain, x)


IMAGES = torch.randn(3, 1, 8, 8)
HOSTS: dict[str, tuple[Host, Tensor]] = {
    "cnn": (CNNHost(1, 10, base=3, blocks=2), IMAGES),
    "fused": (CNNHost(1, 10, base=8, blocks=2), IMAGES),
    "transformer": (
        TransformerHost(11, width=16, layers=2, heads=2, block=9, slots=2),
        torch.randint(0, 11, (3, 9)),
    ),
    "grafted": (
        graft(
            nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(144, 10)),
            {"r0c0": "0"},
            "cnn",
        ),
        IMAGES,
    ),
}


@pytest.mark.parametrize("kind", ["cnn", "fused", "transformer"])
@pytest.mark.parametrize("slots", [["all"], ["r1"], ["r2"]])
def test_a_host_with_seeds_that_read_a_source_becomes_an_ordinary_module(
    kind: str, slots: list[str]
) -> None:
    torch.manual_seed(0)
    host, x = copy.deepcopy(HOSTS[kind])
    host.use_slots(slots)
    names = {
        place.name: BLUEPRINTS.names(host.topology, [place])[-1] for place in host.sites
    }
    kept = {
        name: KeptSeed(blueprint, "LINEAR_ADD", 0.5)
        for name, blueprint in names.items()
    }
    places = {place.name: place for place in host.sites}
    blueprints = {
        name: BLUEPRINTS.at(host.topology, places[name], blueprint)
        for name, blueprint in names.items()
    }
    network = assemble(host, kept, blueprints, "t").eval()
    for parameter in network.seeds.parameters():
        nn.init.normal_(parameter, std=0.3)
    plain = esper.plain(network, x)
    assert without_esper(plain)
    require_same(network, plain, x)
    assert not torch.equal(network(x), host(x))


def test_a_seed_of_a_users_own_class_is_called_as_it_is() -> None:
    class Mine(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.mean() > 0 else -x  # which cannot be traced

    network = grown(
        nn.Sequential(nn.Identity()),
        "0",
        Seed(Mine(8, 8), BlendOperator.MULTIPLY, 8, "mlp"),
    )
    for x in (torch.ones(2, 8), -torch.ones(2, 8)):
        require_same(network, esper.plain(network, torch.randn(2, 8)), x)


@pytest.mark.parametrize("kind", HOSTS)
def test_a_grown_host_becomes_an_ordinary_module(kind: str) -> None:
    torch.manual_seed(0)
    host, x = copy.deepcopy(HOSTS[kind])
    host.probe(x)
    name = BLUEPRINTS.names(host.topology)[-1]
    seeds = {
        s.name: seed_of(name, host.topology, BlendOperator.GATE, s.channels)
        for s in host.sites
    }
    network = GrownHost(
        host,
        seeds,
        {s.name: KeptSeed(name, "GATED_GATE", 0.5) for s in host.sites},
        "t",
    ).eval()
    plain = esper.plain(network, x)
    assert without_esper(plain)
    assert sum(p.numel() for p in plain.parameters()) == sum(
        p.numel() for p in network.parameters()
    )
    require_same(network, plain, x)
    assert not any(module.training for module in plain.modules())
    if len(host.sites) > 1:
        with pytest.warns(UserWarning, match="r0c0: its host is a "):
            esper.plain(network, x, merge=True)


def test_the_copy_of_a_growers_model_has_its_keys_and_trains() -> None:
    loop = Loop().run()
    assert loop.grower is not None
    network = loop.grower.finish()
    network.zero_grad()
    assert list(esper.plain(network, torch.randn(2, 8)).state_dict()) == list(
        network.state_dict()
    )
    network.train()
    network.get_submodule("body.3").eval()  # frozen
    plain = esper.plain(network, torch.randn(2, 8))
    modes = {name: module.training for name, module in plain.named_modules()}
    assert [name for name, mode in modes.items() if not mode] == ["body.3"]
    plain.train()(torch.randn(4, 8)).sum().backward()
    assert all(parameter.grad is not None for parameter in plain.parameters())
    assert all(parameter.grad is None for parameter in network.parameters())


MODEL = """
import torch
from torch import nn


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 8)
        self.gru = nn.GRU(8, 8, batch_first=True)
        self.mix = Mix()
        self.head = nn.Linear(8, 3)

    def forward(self, tokens):
        h, last = self.gru(self.embed(tokens))
        return self.head(self.mix(h, scale=2.0)[:, -1] + last[0])


class Mix(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, h, *, shift=0.0, **options):
        return self.linear(h) * options["scale"] + shift
"""


CHILD = """
import sys
sys.modules["esper"] = None  # which makes `import esper` fail
import torch
network, program, x, wanted = sys.argv[1:3] + [torch.load(path) for path in sys.argv[3:]]
for found in (torch.load(network, weights_only=False)(x), torch.export.load(program).module()(x)):
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
print("same")
"""


@pytest.mark.slow
def test_a_saved_network_runs_where_esper_cannot_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved whole, with a tuple and keywords at its sites; and as a program, with another batch size."""
    (tmp_path / "mine.py").write_text(MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    import mine  # type: ignore[import-not-found]

    torch.manual_seed(0)
    network: nn.Module = mine.Reader().eval()
    for path in ("gru", "mix"):
        grown(network, path, seed_of("attention", "transformer", BlendOperator.GATE))
    x = torch.randint(0, 9, (4, 5))
    plain = esper.plain(network, x).eval()
    require_same(network, plain, x)
    torch.save(plain, tmp_path / "network.pt")
    batch = {0: torch.export.Dim("batch")}
    torch.export.save(
        torch.export.export(network, (x[:3],), dynamic_shapes=(batch,)),
        tmp_path / "network.pt2",
    )
    torch.save(x, tmp_path / "x.pt")
    torch.save(network(x).detach(), tmp_path / "wanted.pt")
    files = [
        str(tmp_path / name)
        for name in ("network.pt", "network.pt2", "x.pt", "wanted.pt")
    ]
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *files],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "same\n", done.stderr


class Skips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.often, self.idle, self.starred = (
            nn.Linear(8, 8),
            nn.Linear(8, 8),
            Starred(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.starred(self.often(x), x)  # type: ignore[no-any-return]


class Starred(nn.Module):
    def forward(self, *both: Tensor) -> Tensor:
        return both[0] + both[1]


@pytest.mark.parametrize(
    ("path", "x", "words"),
    [
        ("idle", torch.randn(2, 8), "the example does not reach idle"),
        (
            "often",
            torch.randn(2, 7),
            "the network cannot run on the example: RuntimeError",
        ),
    ],
)
def test_a_network_that_cannot_be_made_plain_is_refused_with_the_reason(
    path: str, x: Tensor, words: str
) -> None:
    network = grown(Skips(), path, seed_of("lora"))
    with pytest.raises(ConfigError, match=words):
        esper.plain(network, x)
    assert len(list(hooks_of(network))) == 1, "the network itself stays as it was"


class Vae(nn.Module):
    """Samples, and returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        mean = self.encode(x)
        return self.decode(mean + torch.randn_like(mean)), {"mean": mean}


class Graph(nn.Module):
    """Arguments without a dimension of samples, None and a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(8, 8)

    def forward(
        self, x: Tensor, edges: Tensor, weights: Tensor | None, flag: bool = False
    ) -> list[Tensor]:
        h = self.encode(x)
        return [h.index_add(0, edges[1], h[edges[0]]), h if flag else -h]


class Silent(nn.Module):
    """A train() that returns nothing, and freezes a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def train(self, mode: bool = True) -> None:  # type: ignore[override]
        super().train(mode)
        self.norm.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.encode(x))  # type: ignore[no-any-return]


X8 = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
EDGES = torch.tensor([[0, 1, 2], [1, 2, 4]])


@pytest.mark.parametrize(
    ("make", "example"),
    [
        (Vae, X8),
        (Graph, (X8, EDGES, None)),
        (Graph, {"x": X8, "edges": EDGES, "weights": None, "flag": True}),
        (Silent, X8),
    ],
)
@pytest.mark.parametrize("merge", [False, True])
def test_arguments_outputs_and_modes_may_have_any_form(
    make: type[nn.Module], example: Any, merge: bool
) -> None:
    network = grown(make(), "encode", seed_of("lora"))
    plain = esper.plain(network, example, merge=merge)
    assert without_esper(plain)
    assert any("grown_seeds" in key for key in plain.state_dict()) is not merge


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.max = Max()

    def forward(self, x: Tensor) -> Tensor:
        found = self.max(x)
        return found.values * 2 + found.indices  # type: ignore[no-any-return]


Pair = namedtuple("Pair", "values indices")


class Max(nn.Module):
    def forward(self, x: Tensor) -> Pair:
        return Pair(x, x.sign())


def test_a_submodule_that_returns_a_named_tuple_still_does() -> None:
    network = grown(Named(), "max", seed_of("mlp_small"))
    require_same(network, esper.plain(network, X8), X8)


class Closure(nn.Module):
    """Keeps a function that refers to its submodules, as minGPT's blocks do."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        up, down = self.up, self.down
        self.mlp = lambda x: down(torch.relu(up(x)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)  # type: ignore[no-any-return, no-untyped-call]


def test_a_copy_that_would_use_the_networks_own_parameters_is_refused() -> None:
    network = grown(
        nn.Sequential(Closure(), nn.Linear(8, 4)), "0.down", seed_of("mlp_small")
    )
    before = [p.detach().clone() for p in network.parameters()]
    with pytest.raises(ConfigError, match="a lambda, that refers to its submodules"):
        esper.plain(network, X8)
    assert all(
        torch.equal(a, b) for a, b in zip(before, network.parameters(), strict=True)
    )


def test_a_copy_that_was_taken_while_the_model_grew_is_made_plain() -> None:
    loop = Loop().run(6)
    other = copy.deepcopy(loop.model).eval()
    plain = esper.plain(other, X8)
    assert without_esper(plain)
    torch.testing.assert_close(plain.eval()(X8), loop.model.eval()(X8))
