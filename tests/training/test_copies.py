"""Copies of tensors, and back into the memory of the originals."""

from __future__ import annotations

import pytest
import torch

from esper.training.copies import cpu_copy, fill, memory_like, pinned_copy


def test_tensors_are_filled_in_place_by_name() -> None:
    live = {"a": torch.zeros(2), "b": torch.zeros(3)}
    addresses = [tensor.data_ptr() for tensor in live.values()]
    fill(
        live.items(),
        {"b": torch.ones(3), "a": torch.tensor([1.0, 2.0]), "more": torch.ones(1)},
    )
    assert [tensor.tolist() for tensor in live.values()] == [
        [1.0, 2.0],
        [1.0, 1.0, 1.0],
    ]
    assert [tensor.data_ptr() for tensor in live.values()] == addresses


def test_a_tensor_that_was_not_saved_is_an_error() -> None:
    with pytest.raises(KeyError, match="b"):
        fill([("a", torch.zeros(1)), ("b", torch.zeros(1))], {"a": torch.ones(1)})


def test_a_copy_has_the_strides_of_its_tensor() -> None:
    images = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    found = memory_like(images, images.device, pinned=True)
    assert (found.shape, found.stride(), found.dtype) == (
        images.shape,
        images.stride(),
        images.dtype,
    )
    weight = torch.nn.Parameter(torch.randn(2))
    copied = cpu_copy(weight)
    assert not copied.requires_grad
    assert copied.data_ptr() != weight.data_ptr()


@pytest.mark.parametrize("copy", [cpu_copy, pinned_copy])
def test_a_copy_is_of_that_moment(copy: object) -> None:
    weights = torch.ones(3, requires_grad=True)
    copied = copy(weights)  # type: ignore[operator]
    with torch.no_grad():
        weights.zero_()
    assert copied.tolist() == [1.0, 1.0, 1.0]
    assert not copied.requires_grad
