"""The change that a seed makes to features, learned straight through the host's own pass."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from esper.core.place import Features
from esper.core.site import Site
from esper.training.step import blending
from tests.core_helpers import (
    digits,
    make_training,
    plant,
    tiny_config,
    train,
)

STE = {"env": {"incubation": "ste"}}


def seed_of(slot: Site) -> nn.Module:
    assert slot.seed is not None
    return slot.seed


def test_straight_through_the_gradient_of_the_delta_is_that_of_the_features() -> None:
    training = make_training(tiny_config(**STE))
    slot = plant(training, "r0c0")
    x, y = digits().train.x[:32], digits().train.y[:32]
    host = training.host.train()
    h = host.segments[0](x).detach().requires_grad_()  # type: ignore[operator]
    loss = F.cross_entropy(
        host.forward_from(x, 0, Features.at_sink(h), lambda _site, at: at.h), y
    )
    (wanted,) = torch.autograd.grad(loss, h)
    training.reset(0, 0)
    slot = plant(training, "r0c0")
    parameters = list(seed_of(slot).parameters())
    delta = seed_of(slot)(h.detach())
    assert float(delta.detach().norm()) < float(
        h.detach().norm()
    )  # below the limit the scale is 1
    by_hand = torch.autograd.grad((delta * wanted).sum(), parameters)
    logits = training.host.forward_with_hook(x, blending(training, {}))
    found = torch.autograd.grad(F.cross_entropy(logits, y), parameters)
    for a, b in zip(found, by_hand, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)


def rms_ratio(training: object, slot: Site) -> float:
    """RMS(d) / RMS(h) in the slot r0c0."""
    host = training.host.eval()  # type: ignore[attr-defined]
    with torch.no_grad():
        h = host.segments[0](digits().validation.x)
        ratio = float((seed_of(slot).eval()(h).pow(2).mean() / h.pow(2).mean()).sqrt())
    host.train()
    seed_of(slot).train()
    return ratio


@pytest.mark.trap(8)
def test_a_seed_that_learns_straight_through_does_not_outgrow_its_host() -> None:
    """Its objective is linear in d: without the limit it would reward size without end."""
    training = make_training(
        tiny_config(
            horizon=30, task={"samples_per_epoch": 320, "schedule": "constant"}, **STE
        )
    )
    slot = plant(training, "r0c0")
    largest = 0.0
    for _ in range(12):
        train(training)
        largest = max(largest, rms_ratio(training, slot))
    assert 0.3 < largest < 1.5
