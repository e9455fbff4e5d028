"""torchvision's models as hosts."""

from __future__ import annotations

import pytest
import torch

from esper.config import ConfigError
from esper.hosts.zoo import SITES, torchvision_host
from tests.selection import slow_except


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


def test_a_resnet_for_small_images_has_its_known_size() -> None:
    with torch.device("meta"):
        host = torchvision_host("resnet18", 10, small_images=True)
    assert host.parameter_count == 11_173_962
