"""Layers that are wider at once, with the function of the narrow ones."""

from __future__ import annotations

import pytest
import torch

from esper.config import ConfigError
from esper.data import digits
from esper.data.tasks import build_host, load_task
from esper.hosts import net2net
from esper.hosts.cnn import CNNHost
from esper.hosts.host import Host
from esper.hosts.net2net import widen_as_copies


def moved(host: Host) -> Host:
    """The host with statistics and norms that are not those of a new one."""
    with torch.no_grad():
        for tensor in (*host.parameters(), *host.buffers()):
            if tensor.is_floating_point():
                tensor.add_(0.3 * torch.rand_like(tensor))
    return host


@pytest.mark.parametrize("base", [8, 3], ids=["fused norms", "plain norms"])
def test_a_wide_cnn_computes_what_the_narrow_one_does(
    base: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(net2net, "NOISE", 0.0)
    torch.manual_seed(0)
    narrow = moved(CNNHost(1, 10, base=base, blocks=3)).eval()
    wide = CNNHost(1, 10, base=2 * base, blocks=3).eval()
    widen_as_copies(narrow, wide)
    x = torch.randn(4, 1, 16, 16)
    assert torch.allclose(narrow(x), wide(x), rtol=1e-4, atol=1e-4)


def test_a_wide_mlp_computes_what_the_narrow_one_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(net2net, "NOISE", 0.0)
    torch.manual_seed(0)
    narrow, wide = (
        moved(digits.mlp_of_widths(5, 7)).eval(),
        digits.mlp_of_widths(9, 16).eval(),
    )
    widen_as_copies(narrow, wide)
    x = load_task("digits_table").sample
    assert torch.allclose(narrow(x), wide(x), rtol=1e-4, atol=1e-4)


def test_copies_differ_by_noise_so_that_they_can_learn_different_things() -> None:
    torch.manual_seed(0)
    narrow, wide = CNNHost(1, 10, base=3, blocks=2), CNNHost(1, 10, base=6, blocks=2)
    widen_as_copies(narrow, wide)
    old, new = next(narrow.parameters()), next(wide.parameters())
    assert torch.equal(new[:3], old)
    distances = torch.cdist(new[3:].flatten(1), old.flatten(1)).min(dim=1).values
    assert ((distances > 0) & (distances < 0.2)).all()


def test_hosts_that_are_no_chain_of_layers_are_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"widens chains of convolutions, linear layers and BatchNorms; this host has a [A-Z]",
    ):
        widen_as_copies(build_host("chars"), build_host("chars"))
    with pytest.raises(ConfigError, match="these two hosts have different ones"):
        widen_as_copies(
            CNNHost(1, 10, base=3, blocks=2), CNNHost(1, 10, base=3, blocks=3)
        )
