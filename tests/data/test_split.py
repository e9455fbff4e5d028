"""Splits in memory: inputs of networks, rows evenly spaced, and the checks of their tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from esper.config import ConfigError
from esper.data.split import Split
from tests.data.byte_images import CPU, colours, looked_up


def test_networks_see_each_pixel_through_the_table_of_its_channel() -> None:
    split = colours()
    seen = split.inputs(3, 20)
    assert torch.equal(seen, looked_up(split, torch.arange(3, 20)))
    assert seen.dtype == torch.float32
    assert seen.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(split.inputs(3, 20, torch.bfloat16), seen.bfloat16())
    assert split.inputs(35, 100).shape == (
        5,
        3,
        6,
        6,
    )  # as a slice ends where the data does
    values = (
        split.x[0, 0, 0].double() / 255 - torch.tensor([0.2, 0.4, 0.6])
    ) / torch.tensor([0.1, 0.2, 0.3])
    torch.testing.assert_close(split.inputs(0, 1)[0, :, 0, 0], values.float())


def test_inputs_other_than_bytes_are_returned_unchanged() -> None:
    x = torch.randn(5, 3)
    split = Split(x, torch.zeros(5, dtype=torch.int64))
    assert torch.equal(split.inputs(1, 9, torch.bfloat16), x[1:])
    assert split.empty(2, torch.bfloat16).dtype == torch.float32


def test_a_split_moves_with_its_table() -> None:
    split = colours().to(torch.device("meta"))
    assert split.table is not None
    assert {tensor.device.type for tensor in (split.x, split.y, split.table)} == {
        "meta"
    }
    plain = Split(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)).to(CPU)
    assert plain.table is None


def changed(**fields: Tensor) -> Split:
    split = colours(4)
    return Split(**{"x": split.x, "y": split.y, "table": split.table, **fields})  # type: ignore[arg-type]


GOOD = colours(4)


WRONG = {
    "float32 pixels": (
        changed(x=GOOD.x.float()),
        r"inputs are uint8 \[N, H, W, C\] .*; not torch.float32 of shape",
    ),
    "no channels": (changed(x=GOOD.x[..., 0]), r"not torch.uint8 of shape \(4, 6, 6\)"),
    "text": (
        changed(y=torch.zeros(4, 2, dtype=torch.int64)),
        r"targets \[N\]; not .* and \(4, 2\)",
    ),
    "table of one channel": (
        changed(table=torch.zeros(1, 256)),
        r"of shape \(1, 256\); images of 3 channels need",
    ),
    "table of float64": (
        changed(table=torch.zeros(3, 256).double()),
        "see esper.ops.stage_batch.normalisation_table",
    ),
    "channels first": (
        changed(x=torch.zeros(4, 3, 32, 32, dtype=torch.uint8)),
        r"images of 32 channels need",
    ),
    "permuted": (
        changed(x=torch.zeros(4, 3, 6, 6, dtype=torch.uint8).permute(0, 2, 3, 1)),
        r"inputs must be contiguous; call .contiguous\(\) after a permute",
    ),
    "every other target": (
        changed(y=torch.zeros(8, dtype=torch.int64)[::2]),
        "targets must be contiguous",
    ),
    "table transposed": (
        changed(table=torch.zeros(256, 3).t()),
        "the table must be contiguous",
    ),
    "too many channels": (
        changed(
            x=torch.zeros(4, 2, 2, 33, dtype=torch.uint8), table=torch.zeros(33, 256)
        ),
        "1 to 32 channels and some pixels",
    ),
    "no pixels": (changed(x=torch.zeros(4, 0, 6, 3, dtype=torch.uint8)), "some pixels"),
}


@pytest.mark.parametrize("what", WRONG)
def test_bytes_that_cannot_be_staged_are_refused(what: str) -> None:
    split, words = WRONG[what]
    with pytest.raises(ConfigError, match=f"mine, train split: .*{words}"):
        split.check("mine, train split", 10)
    GOOD.check("good", 10)


def test_evenly_spaced_rows() -> None:
    rows = torch.arange(11).unsqueeze(1)
    assert Split(x=rows, y=rows).evenly_spaced(3).x.flatten().tolist() == [0, 5, 10]
    assert Split(x=rows, y=rows).evenly_spaced(20).x.flatten().tolist() == list(
        range(11)
    )
