"""A grown network without Esper: the same outputs, from modules that need none of its classes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import esper
from esper.config import ConfigError
from esper.hosts.cnn import CNNHost
from esper.hosts.graft import graft
from esper.hosts.grown import GrownHost, KeptSeed
from esper.hosts.grown_module import GrownModule
from esper.hosts.host import Host
from esper.hosts.transformer import TransformerHost
from esper.lifecycle.ramps import BlendOperator
from esper.seeds.blend import Seed
from esper.seeds.blueprints import BLUEPRINTS
from tests.grower.loops import Loop
from tests.hosts.grown_modules import grown, require_same, seed_of

SHAPES = {"cnn": (2, 8, 5, 5), "transformer": (2, 7, 8), "encoder": (2, 7, 8), "mlp": (2, 8)}


def without_esper(network: nn.Module) -> bool:
    return not any(type(module).__module__.startswith("esper") for module in network.modules())


@pytest.mark.parametrize("topology", SHAPES)
@pytest.mark.parametrize("operator", BlendOperator)
def test_every_seed_computes_the_same_without_esper(topology: str, operator: BlendOperator) -> None:
    torch.manual_seed(0)
    for name in BLUEPRINTS.names(topology):
        network = grown(nn.Sequential(nn.Identity(), nn.Identity()), "0", seed_of(name, topology, operator))
        x = torch.randn(SHAPES[topology])
        copy = esper.plain(network, x)
        assert without_esper(copy)
        assert not without_esper(network)
        require_same(network, copy, x)


def test_a_seed_of_a_users_own_class_is_called_as_it_is() -> None:
    class Mine(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.mean() > 0 else -x  # which cannot be traced

    network = grown(nn.Sequential(nn.Identity()), "0", Seed(Mine(8, 8), BlendOperator.MULTIPLY, 8, "mlp"))
    for x in (torch.ones(2, 8), -torch.ones(2, 8)):
        require_same(network, esper.plain(network, torch.randn(2, 8)), x)


@pytest.mark.parametrize(
    ("host", "x"),
    [
        (CNNHost(1, 10, base=3, blocks=2), torch.randn(3, 1, 8, 8)),
        (CNNHost(1, 10, base=8, blocks=2), torch.randn(3, 1, 8, 8)),
        (TransformerHost(11, width=16, layers=2, heads=2, block=9, slots=2), torch.randint(0, 11, (3, 9))),
        (graft(nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(144, 10)), {"r0c0": "0"}), None),
    ],
    ids=["cnn", "fused", "transformer", "grafted"],
)
def test_a_grown_host_becomes_an_ordinary_module(host: Host, x: Tensor | None) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 1, 8, 8) if x is None else x
    host.probe(x)
    name = BLUEPRINTS.names(host.topology)[-1]
    seeds = {s.name: seed_of(name, host.topology, BlendOperator.GATE, s.channels) for s in host.sites}
    network = GrownHost(host, seeds, {s.name: KeptSeed(name, "GATED_GATE", 0.5) for s in host.sites}, "t").eval()
    copy = esper.plain(network, x)
    assert without_esper(copy)
    assert sum(p.numel() for p in copy.parameters()) == sum(p.numel() for p in network.parameters())
    require_same(network, copy, x)
    assert not any(module.training for module in copy.modules())
    if len(host.sites) > 1:
        with pytest.warns(UserWarning, match="r0c0: its host is a "):
            esper.plain(network, x, merge=True)


def test_the_weights_of_a_copy_go_through_safetensors(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 8)
    network = grown(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)), "1", seed_of("mlp_small"))
    network.train()(x)  # its running statistics are weights, too
    copy = esper.plain(network, x)
    save_file(copy.state_dict(), tmp_path / "weights.safetensors")
    other = esper.plain(network, x)
    for tensor in other.state_dict().values():
        tensor.zero_()
    other.load_state_dict(load_file(tmp_path / "weights.safetensors"))
    require_same(network, other, x)


def test_the_model_of_a_grower_needs_no_hooks_and_its_copy_trains() -> None:
    loop = Loop().run()
    assert loop.grower is not None
    network = loop.grower.finish()
    network.zero_grad()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in network.modules())
    network.train().body[3].eval()  # frozen
    copy = esper.plain(network, torch.randn(2, 8))
    modes = {name: module.training for name, module in copy.named_modules()}
    assert [name for name, mode in modes.items() if not mode] == ["body.3"]
    copy.train()(torch.randn(4, 8)).sum().backward()
    assert all(parameter.grad is not None for parameter in copy.parameters())
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


def test_a_saved_network_runs_where_esper_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saved whole, with a tuple and keywords at its sites; and as a program, with another batch size."""
    (tmp_path / "mine.py").write_text(MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    import mine  # type: ignore[import-not-found]

    torch.manual_seed(0)
    network: nn.Module = mine.Reader().eval()
    for path in ("gru", "mix"):
        grown(network, path, seed_of("attention", "transformer", BlendOperator.GATE))
    x = torch.randint(0, 9, (4, 5))
    copy = esper.plain(network, x).eval()
    require_same(network, copy, x)
    torch.save(copy, tmp_path / "network.pt")
    batch = {0: torch.export.Dim("batch")}
    torch.export.save(torch.export.export(network, (x[:3],), dynamic_shapes=(batch,)), tmp_path / "network.pt2")
    torch.save(x, tmp_path / "x.pt")
    torch.save(network(x).detach(), tmp_path / "wanted.pt")
    files = [str(tmp_path / name) for name in ("network.pt", "network.pt2", "x.pt", "wanted.pt")]
    done = subprocess.run([sys.executable, "-c", CHILD, *files], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "same\n", done.stderr


class Skips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.often, self.idle, self.starred = nn.Linear(8, 8), nn.Linear(8, 8), Starred()

    def forward(self, x: Tensor) -> Tensor:
        return self.starred(self.often(x), x)  # type: ignore[no-any-return]


class Starred(nn.Module):
    def forward(self, *both: Tensor) -> Tensor:
        return both[0] + both[1]


@pytest.mark.parametrize(
    ("path", "x", "words"),
    [
        ("idle", torch.randn(2, 8), "the example does not reach idle"),
        ("often", torch.randn(2, 7), "the network cannot run on the example: RuntimeError"),
        ("starred", torch.randn(2, 8), r"starred has grown, and Starred.forward takes \*arguments"),
    ],
)
def test_a_network_that_cannot_be_made_plain_is_refused_with_the_reason(path: str, x: Tensor, words: str) -> None:
    network = grown(Skips(), path, seed_of("lora"))
    with pytest.raises(ConfigError, match=words):
        esper.plain(network, x)
    assert isinstance(network.get_submodule(path), GrownModule)
