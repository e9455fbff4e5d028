"""AdamW against ``torch.optim.AdamW``: the same bits unclipped, a clip and a skip as on the CPU by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from esper.ops import AdamW, adamw_step

GENERATOR = torch.Generator().manual_seed(0)


def weights() -> list[Tensor]:
    """A matrix, a bias and the scale of a norm."""
    return [torch.randn(shape, generator=GENERATOR).requires_grad_() for shape in ((4, 5), (5,), ())]


def copies(parameters: list[Tensor]) -> list[Tensor]:
    return [parameter.detach().clone().requires_grad_() for parameter in parameters]


def reference(parameters: list[Tensor], rate: float = 0.01, decay: float = 0.1) -> torch.optim.AdamW:
    groups = [{"params": parameters[:1]}, {"params": parameters[1:], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, weight_decay=decay, fused=True)


def draw(mine: list[Tensor], theirs: list[Tensor], factor: float = 1.0) -> None:
    for own, other in zip(mine, theirs, strict=True):
        own.grad = torch.randn(own.shape, generator=GENERATOR)
        other.grad = own.grad * factor


def state_of(optimizer: AdamW) -> list[Tensor]:
    return [value.clone() for state in optimizer.state.values() for value in state.values()]


def test_a_step_equals_torchs_with_decay_of_matrices_only() -> None:
    mine = weights()
    theirs, rate = copies(mine), torch.tensor(0.01)
    ours, twin = AdamW(mine, rate, weight_decay=0.1), reference(theirs)
    for step in range(6):
        draw(mine, theirs)
        rate.fill_(0.01 / (1 + step))
        for group in twin.param_groups:
            group["lr"] = float(rate)
        ours.step()
        twin.step()
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_a_clip_coefficient_scales_the_gradients_of_its_optimizer() -> None:
    first, second = weights(), weights()
    twins = copies(first), copies(second)
    rate = torch.tensor(0.01)
    ours, references = [AdamW(each, rate, weight_decay=0.1) for each in (first, second)], [*map(reference, twins)]
    for _ in range(4):
        draw(first, twins[0], factor=0.25)
        draw(second, twins[1])
        adamw_step(ours, torch.tensor([0.25, 1.0], dtype=torch.float64))
        for twin in references:
            twin.step()
    for mine, theirs in ((first, twins[0]), (second, twins[1])):
        for own, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("coefficient", [0.0, float("nan")])
def test_a_coefficient_of_zero_or_nan_changes_nothing(coefficient: float) -> None:
    mine = weights()
    optimizer = AdamW(mine, torch.tensor(0.01))
    draw(mine, mine)
    optimizer.step()
    before, values = state_of(optimizer), [p.detach().clone() for p in mine]
    mine[0].grad = torch.full((4, 5), float("nan"))
    optimizer.step(clip_coef=torch.tensor(coefficient, dtype=torch.float64))
    assert all(torch.equal(a, b) for a, b in zip(before, state_of(optimizer), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(values, mine, strict=True))


def test_parameters_without_a_gradient_are_left_alone() -> None:
    mine = weights()
    optimizer = AdamW(mine, torch.tensor(0.01))
    before = [p.detach().clone() for p in mine]
    mine[1].grad = torch.ones(5)
    optimizer.step()
    assert [torch.equal(a, b) for a, b in zip(before, mine, strict=True)] == [True, False, True]


def test_zero_state_keeps_the_storage_and_starts_anew() -> None:
    mine = weights()
    theirs = copies(mine)
    optimizer = AdamW(mine, torch.tensor(0.01))
    optimizer.zero_state()
    places = [value.data_ptr() for state in optimizer.state.values() for value in state.values()]
    draw(mine, mine)
    optimizer.step()
    assert all(bool(value.any()) for value in state_of(optimizer))
    optimizer.zero_state()
    assert [value.data_ptr() for state in optimizer.state.values() for value in state.values()] == places
    assert not any(bool(value.any()) for value in state_of(optimizer))
    with torch.no_grad():
        for own, other in zip(mine, theirs, strict=True):
            own.copy_(other)
    twin = reference(theirs, decay=1e-2)
    draw(mine, theirs)
    optimizer.step()
    twin.step()
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_torch_loads_its_state() -> None:
    layer = nn.Linear(3, 2)
    optimizer = AdamW(list(layer.parameters()), torch.tensor(0.01), weight_decay=0.1)
    other = nn.Linear(3, 2)
    other.load_state_dict(layer.state_dict())
    for network in (layer, other):
        network(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    other.load_state_dict(layer.state_dict())
    twin = reference([other.weight, other.bias])
    twin.load_state_dict(optimizer.state_dict())
    for each in (optimizer, twin):
        each.step()
    assert torch.equal(layer.weight, other.weight)
    assert torch.equal(layer.bias, other.bias)
