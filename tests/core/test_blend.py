"""Blending: operators, the gate and its input, and the scale of a delta at birth."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from esper.core.action import ALPHA_CURVES
from esper.core.action import STYLES as STYLE_NAMES
from esper.core.blend import Seed, gate_parameters, limited, pass_through, running_mean
from esper.core.ramps import STYLES, AlphaCurve, BlendOperator

WIDTHS = (1, 3, 4, 6, 8, 16, 17, 24, 32, 48, 64, 96)


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("width", WIDTHS)
def test_the_gate_has_the_parameters_it_states(width: int) -> None:
    size = max(8, width // 4)
    expected = (width * size + size) + (size * 1 + 1)
    for topology in ("cnn", "transformer", "mlp", "of a user"):
        plain = count(Seed(nn.Identity(), BlendOperator.ADD, width, topology))
        gated = count(Seed(nn.Identity(), BlendOperator.GATE, width, topology))
        assert (plain, gated) == (0, expected)
    assert gate_parameters(width) == expected


def test_the_operators_are_what_they_say() -> None:
    h = torch.randn(4, 6, 2, 2)
    body = nn.Conv2d(6, 6, 1)
    f = body(h)
    torch.testing.assert_close(Seed(body, BlendOperator.ADD, 6, "cnn")(h), f)
    torch.testing.assert_close(
        Seed(body, BlendOperator.MULTIPLY, 6, "cnn")(h), h * torch.tanh(f)
    )
    gated = Seed(body, BlendOperator.GATE, 6, "cnn")
    first, last = (layer for layer in gated.modules() if isinstance(layer, nn.Linear))
    g = torch.sigmoid(last(nn.functional.silu(first(h.mean(dim=(2, 3))))))
    assert g.shape == (4, 1)
    torch.testing.assert_close(gated(h), g.reshape(4, 1, 1, 1) * f)


def test_the_names_a_controller_can_choose_are_those_of_the_seeds() -> None:
    assert tuple(STYLES) == STYLE_NAMES
    assert tuple(curve.value for curve in AlphaCurve) == ALPHA_CURVES


def test_the_gate_of_a_sequence_sees_the_mean_so_far() -> None:
    """Position t holds 10 t, t from 1: the means are 10, 15, 20, 25."""
    h = torch.tensor([10.0, 20.0, 30.0, 40.0])[None, :, None].expand(2, 4, 3)
    expected = torch.tensor([10.0, 15.0, 20.0, 25.0])[None, :, None].expand(2, 4, 3)
    assert torch.equal(running_mean(h), expected)
    assert torch.equal(
        running_mean(h.reshape(2, 2, 2, 3)), expected.reshape(2, 2, 2, 3)
    )
    assert running_mean(h.double()).dtype == torch.float64


def test_the_mean_over_a_long_sequence_is_as_exact_in_bfloat16() -> None:
    """A count of 257 is no bfloat16 number, nor are most sums of that size."""
    h = torch.rand(2, 2000, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(running_mean(h), running_mean(h.float()).bfloat16())


def gate_of(seed: Seed, pooled: Tensor) -> Tensor:
    assert isinstance(seed.gate, nn.Sequential)
    first, last = seed.gate[0], seed.gate[2]
    return torch.sigmoid(last(nn.functional.silu(first(pooled))))


@pytest.mark.parametrize("topology", ["transformer", "mlp", "of a user"])
def test_the_gate_of_channels_last_is_one_number_a_position(topology: str) -> None:
    torch.manual_seed(0)
    body = nn.Linear(6, 6)
    seed = Seed(body, BlendOperator.GATE, 6, topology)
    rows, sequence = torch.randn(4, 6), torch.randn(4, 5, 6)
    g = gate_of(seed, rows)
    assert g.shape == (4, 1)
    torch.testing.assert_close(seed(rows), g * body(rows))
    for t in range(5):
        g = gate_of(seed, sequence[:, : t + 1].mean(dim=1))
        torch.testing.assert_close(seed(sequence)[:, t], g * body(sequence[:, t]))


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


def test_a_forward_derivative_is_that_of_the_features() -> None:
    h, d = torch.randn(3, 4), torch.randn(3, 4)
    tangent = torch.randn(3, 4)
    with forward_ad.dual_level():
        out = pass_through(forward_ad.make_dual(h, tangent), d)
        assert torch.equal(forward_ad.unpack_dual(out).tangent, tangent)
        assert forward_ad.unpack_dual(pass_through(h, d)).tangent is None
