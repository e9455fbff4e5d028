"""Learning straight through: bits of the features, and the gradient of a delta of limited size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from esper.seeds.straight_through import limited, pass_through


def by_autograd(h: Tensor, d: Tensor, weights: Tensor) -> Tensor:
    """The gradient of min(1, RMS(h)/RMS(d)) · d by autograd, and the restoring one above the limit."""
    scale = (h.pow(2).mean() / d.pow(2).mean()).sqrt().clamp(max=1)
    (gradient,) = torch.autograd.grad((scale * d * weights).sum(), d)
    excess = (d.norm() / h.norm() - 1).clamp(min=0)
    return gradient + gradient.norm() * excess * d.detach() / d.norm().detach()


def features(size: float, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Random features, a delta of this size in units of theirs, and a gradient; float64."""
    draw = torch.Generator().manual_seed(seed)
    h, d, weights = (
        torch.randn(4, 3, 5, 5, generator=draw, dtype=torch.float64) for _ in range(3)
    )
    d = d * (size * h.norm() / d.norm())
    return h.requires_grad_(), d.requires_grad_(), weights


@pytest.mark.parametrize("size", [0.1, 0.99, 1.01, 3.0])
def test_the_gradient_of_the_delta_is_that_of_its_limited_size(size: float) -> None:
    h, d, weights = features(size)
    out = pass_through(h, d)
    of_h, of_d = torch.autograd.grad((out * weights).sum(), (h, d))
    assert torch.equal(of_h, weights)
    torch.testing.assert_close(
        of_d, by_autograd(h.detach(), d, weights), rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("size_of_h", [0.0, 1.0])
@pytest.mark.parametrize("size", [0.0, 0.1, 0.99, 1.01, 3.0])
def test_what_a_cpu_leaves_out_within_the_limit_would_change_no_bit(
    size: float, size_of_h: float
) -> None:
    h, d, weights = features(1.0)
    h = (size_of_h * h).detach()
    d = (size * d).detach().requires_grad_()
    (of_d,) = torch.autograd.grad((pass_through(h, d) * weights).sum(), d)
    with torch.no_grad():
        assert torch.equal(of_d, limited(weights, d, h.norm(), d.norm()))


def test_above_the_limit_a_step_against_the_gradient_makes_the_delta_smaller() -> None:
    h, d, weights = features(3.0)
    (of_d,) = torch.autograd.grad((pass_through(h, d) * weights).sum(), d)
    assert float((of_d * d).sum().detach()) > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_features_keep_their_bits_even_negative_zeros(dtype: torch.dtype) -> None:
    h = torch.randn(64, 8).to(dtype)
    h[0] = -0.0
    out = pass_through(h, torch.randn(64, 8, requires_grad=True))
    assert out.dtype == dtype
    assert out.requires_grad
    assert torch.equal(torch.signbit(out), torch.signbit(h))
    assert torch.equal(out, h)


@pytest.mark.parametrize("zero", ["features", "delta", "both"])
def test_gradients_are_finite_if_features_or_the_delta_are_zero(zero: str) -> None:
    h = torch.zeros(8, 4) if zero != "delta" else torch.randn(8, 4)
    d = torch.zeros(8, 4) if zero != "features" else torch.randn(8, 4)
    d.requires_grad_()
    (of_d,) = torch.autograd.grad(pass_through(h, d).sum(), d)
    assert bool(torch.isfinite(of_d).all())


def test_the_output_may_be_changed_in_place() -> None:
    """A layer behind the site may be a ReLU that works in place."""
    h, d, _ = features(0.5)
    torch.relu_(pass_through(h, d)).sum().backward()
    assert h.grad is not None
    assert torch.equal(h.grad, (h > 0).double())


def test_a_second_derivative_is_that_of_the_formula() -> None:
    """A loop may penalise the size of gradients."""
    h, d, weights = features(0.5)
    weights.requires_grad_()
    (of_d,) = torch.autograd.grad(
        (pass_through(h, d) * weights).sum(), d, create_graph=True
    )
    (second,) = torch.autograd.grad(of_d.square().sum(), weights)
    torch.testing.assert_close(
        second, 2 * weights.detach()
    )  # below the limit the gradient is the weights
