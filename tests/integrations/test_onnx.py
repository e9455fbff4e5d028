"""Grown networks in ONNX, run by onnxruntime."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import esper
from esper.core.blueprints import BLUEPRINTS
from esper.core.ramps import BlendOperator
from esper.hosts.cnn import CNNHost
from esper.hosts.grown import GrownHost, KeptSeed
from esper.hosts.transformer import TransformerHost
from tests.grower.loops import Loop
from tests.hosts.grown_modules import seed_of

pytest.importorskip(
    "onnxscript", reason="onnxscript is not installed; see the extra integrations"
)
runtime = pytest.importorskip(
    "onnxruntime", reason="onnxruntime is not installed; see the extra integrations"
)


def grown_host(host: CNNHost | TransformerHost) -> nn.Module:
    torch.manual_seed(0)
    name = BLUEPRINTS.names(host.topology)[-1]
    seeds = {
        s.name: seed_of(name, host.topology, BlendOperator.GATE, s.channels)
        for s in host.sites
    }
    return GrownHost(
        host,
        seeds,
        {s.name: KeptSeed(name, "GATED_GATE", 0.5) for s in host.sites},
        "t",
    ).eval()


def require_same(network: nn.Module, x: Tensor, folder: Path) -> None:
    """Exports with two samples, and runs all samples of ``x``."""
    batch = {0: torch.export.Dim("batch")}
    torch.onnx.export(
        network,
        (x[:2],),
        folder / "network.onnx",
        dynamic_shapes=(batch,),
        verbose=False,
    )
    session = runtime.InferenceSession(
        folder / "network.onnx", providers=["CPUExecutionProvider"]
    )
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(
        torch.from_numpy(found), network(x).detach(), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    ("network", "x"),
    [
        (grown_host(CNNHost(1, 10, base=8, blocks=2)), torch.randn(5, 1, 8, 8)),
        (
            grown_host(
                TransformerHost(11, width=16, layers=2, heads=2, block=9, slots=2)
            ),
            torch.randint(0, 11, (5, 9)),
        ),
    ],
    ids=["cnn", "transformer"],
)
def test_a_grown_host_runs_in_onnx(
    network: nn.Module, x: Tensor, tmp_path: Path
) -> None:
    require_same(esper.plain(network, x), x, tmp_path)


def test_the_model_of_a_grower_runs_in_onnx(tmp_path: Path) -> None:
    loop = Loop().run()
    assert loop.grower is not None
    require_same(loop.grower.finish().eval(), torch.randn(5, 8), tmp_path)
