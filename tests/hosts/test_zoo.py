"""torchvision's models as hosts."""

from __future__ import annotations

import pytest
import torch

from esper.config import ConfigError
from esper.core.blend import Seed
from esper.core.blueprints import BLUEPRINTS
from esper.core.ramps import BlendOperator
from esper.hosts.zoo import SITES, torchvision_host
from tests.selection import slow_except


@pytest.mark.slow
def test_a_seed_learns_in_a_resnet18_for_small_images() -> None:
    """Images of 32 pixels, as CIFAR's."""
    host = torchvision_host(
        "resnet18", 2, sites={"r0c0": "layer1", "r0c1": "layer4"}, small_images=True
    )
    x = torch.randn(2, 3, 32, 32)
    host.probe(x)
    assert [site.channels for site in host.sites] == [64, 512]
    assert host.parameter_count == 11_173_962 - 8 * 513
    seed = Seed(
        BLUEPRINTS.get("cnn", "conv_light").build(64), BlendOperator.ADD, 64, "cnn"
    )
    logits = host.train().forward_with_hook(
        x, lambda site, at: at.h + seed(at.h) if site == 0 else at.h
    )
    torch.nn.functional.cross_entropy(logits, torch.tensor([0, 1])).backward()
    for parameter in (*host.parameters(), *seed.parameters()):
        assert parameter.grad is not None
        assert bool(parameter.grad.isfinite().all())
        assert float(parameter.grad.norm()) > 0


@pytest.mark.parametrize(
    "name",
    slow_except(["mobilenet_v2"], ["mobilenet_v2", "convnext_tiny", "densenet121"]),
)
def test_known_sites_can_hold_slots(name: str) -> None:
    host = torchvision_host(name, 10, SITES[name])
    host.probe(torch.randn(2, 3, 64, 64))
    assert [site.name for site in host.sites] == ["r0c0", "r0c1", "r0c2", "r0c3"]
    assert host.eval()(torch.randn(2, 3, 64, 64)).shape == (2, 10)


def test_wrong_names_list_the_right_ones() -> None:
    with pytest.raises(ConfigError, match=r"no model 'resnet17'; it has: .*resnet18"):
        torchvision_host("resnet17", 10)
    with pytest.raises(
        ConfigError,
        match=r"no sites are known for 'alexnet': name them, or choose one of resnet18",
    ):
        torchvision_host("alexnet", 10)
    with pytest.raises(ConfigError, match=r"no submodule 'layer9'; it has: conv1"):
        torchvision_host("resnet18", 10, {"r0c0": "layer9"})
    with pytest.raises(ConfigError, match="for ResNets; densenet121 is not one"):
        torchvision_host("densenet121", 10, small_images=True)
