"""Every blueprint with every operator: finite, small at birth, and every parameter learns within two steps of it."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.core.blend import Seed
from esper.core.blueprints import BLUEPRINTS
from esper.core.ramps import BlendOperator

TOPOLOGIES = ("cnn", "transformer", "encoder", "mlp")
CASES = [
    (topology, name) for topology in TOPOLOGIES for name in BLUEPRINTS.names(topology)
]
WIDTHS = (3, 17, 64)
CLASSES = 10


def features(topology: str, width: int, scale: float = 1.0) -> Tensor:
    """Features as of a host's layers: after a ReLU for images, of both signs elsewhere."""
    if topology == "cnn":
        return scale * torch.relu(torch.randn(8, width, 6, 6))
    return scale * (
        torch.randn(8, 7, width)
        if topology in ("transformer", "encoder")
        else torch.randn(8, width)
    )


def make(topology: str, name: str, operator: BlendOperator, width: int) -> Seed:
    return Seed(BLUEPRINTS.get(topology, name).build(width), operator, width, topology)


def head(topology: str, width: int) -> nn.Module:
    """The rest of a host: features to logits [B, classes] or [B, T, classes]."""
    if topology == "cnn":
        return nn.Sequential(
            nn.Conv2d(width, 16, 3),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(16, CLASSES),
        )
    return nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.Linear(16, CLASSES))


def dead_after_two_steps(seed: Seed, topology: str, width: int) -> set[str]:
    """Names of the parameters that had no gradient in two steps of descent at the rate of the images' task.

    A gradient that is not finite fails at once.
    """
    rest = head(topology, width)
    optimizer = torch.optim.SGD(seed.parameters(), lr=0.05, momentum=0.9)
    dead = set(dict(seed.named_parameters()))
    for _ in range(2):
        h = features(topology, width)
        logits = rest(h + seed(h)).reshape(-1, CLASSES)
        optimizer.zero_grad()
        F.cross_entropy(logits, torch.randint(CLASSES, logits.shape[:1])).backward()
        for name, parameter in seed.named_parameters():
            assert parameter.grad is not None, name
            assert bool(torch.isfinite(parameter.grad).all()), name
            if float(parameter.grad.norm()) > 0:
                dead.discard(name)
        optimizer.step()
    return dead


@pytest.mark.trap(6)
@pytest.mark.parametrize("operator", BlendOperator)
@pytest.mark.parametrize(("topology", "name"), CASES)
def test_every_parameter_of_every_blueprint_is_alive_within_two_steps(
    topology: str, name: str, operator: BlendOperator
) -> None:
    torch.manual_seed(0)
    for width in WIDTHS:
        seed = make(topology, name, operator, width)
        assert not dead_after_two_steps(seed, topology, width), width


@pytest.mark.trap(8)
@pytest.mark.parametrize("operator", BlendOperator)
@pytest.mark.parametrize(("topology", "name"), CASES)
def test_a_seed_keeps_the_shape_and_is_born_smaller_than_the_features(
    topology: str, name: str, operator: BlendOperator
) -> None:
    torch.manual_seed(0)
    # A product ends at h itself.
    bound = 1.0 if operator is BlendOperator.MULTIPLY else 0.6
    for width in WIDTHS:
        for scale in (0.3, 10.0):
            h = features(topology, width, scale)
            delta = make(topology, name, operator, width)(h).detach()
            assert delta.shape == h.shape
            assert bool(torch.isfinite(delta).all())
            size = float(delta.square().mean().sqrt())
            reference = float(h.square().mean().sqrt())
            assert 0 < size <= bound * reference, (width, scale)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_seed_is_finite_on_features_of_zeros(topology: str) -> None:
    """A dead layer of a host, or padding, is no reason for a NaN, neither forward nor backward."""
    for name in BLUEPRINTS.names(topology):
        for operator in BlendOperator:
            seed, h = (
                make(topology, name, operator, 16),
                torch.zeros_like(features(topology, 16)),
            )
            delta = seed(h)
            delta.sum().backward()
            assert bool(torch.isfinite(delta).all())
            assert all(
                p.grad is not None and bool(torch.isfinite(p.grad).all())
                for p in seed.parameters()
            )
