"""Counts of floating-point operations."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional

from esper.hosts.example import counting
from esper.ops.norm_relu_pool import NormReluPool


def test_backward_passes_are_counted_even_where_the_gradient_is_that_of_an_input() -> (
    None
):
    x = torch.zeros(3, 5, requires_grad=True)
    with counting() as counter:
        torch.autograd.grad(nn.Linear(5, 7)(x).sum(), [x])
    assert counter.get_total_flops() == 2 * 2 * 3 * 5 * 7


def test_the_products_of_attention_are_counted() -> None:
    q = torch.zeros(1, 2, 6, 4)
    with counting() as counter:
        functional.scaled_dot_product_attention(q, q, q)
    assert counter.get_total_flops() == 2 * 2 * 2 * 6 * 6 * 4


def test_normalisation_and_activations_are_not_counted() -> None:
    with counting() as counter:
        NormReluPool(8)(
            torch.zeros(2, 8, 4, 4).contiguous(memory_format=torch.channels_last)
        )
        functional.gelu(nn.LayerNorm(4)(torch.zeros(3, 4)))
    assert counter.get_total_flops() == 0


def test_an_error_ends_the_counting_and_nothing_keeps_the_counter() -> None:
    with pytest.raises(RuntimeError), counting() as counter:
        nn.Linear(5, 7)(torch.zeros(3, 4))
    nn.Linear(5, 7)(torch.zeros(3, 5))
    assert counter.get_total_flops() == 0
    gone = weakref.ref(counter)
    gc.disable()
    try:
        del counter
        assert gone() is None
    finally:
        gc.enable()
