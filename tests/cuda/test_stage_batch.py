"""The CUDA kernels that stage batches, on a GPU or emulated: the tests of the CPU kernels, grids and launches."""

import pytest
import torch
from torch import Tensor

from esper.ops.stage_batch import stage_images, stage_tokens
from tests.emulation.device import KernelDevice
from tests.ops.stage_batch_twin import stage_images_twin
from tests.ops.test_stage_batch import (  # noqa: F401  the tests run with these kernels, too
    DTYPES,
    dataset,
    test_an_empty_batch,
    test_equals_the_twin,
    test_rows_of_tokens_and_the_tokens_that_follow,
)


def batch_like(
    device: KernelDevice, batch: int, images: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    _, height, width, channels = images.shape
    shape = (batch, channels, height, width)
    return torch.empty(
        shape, dtype=dtype, device=device.torch, memory_format=torch.channels_last
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bits_of_the_cpu_for_a_large_batch(
    device: KernelDevice, dtype: torch.dtype
) -> None:
    """1024 blocks take 8192 parts of images at a time; 9000 are two per image in float32, one in bfloat16."""
    count = 9000 if dtype == torch.bfloat16 else 4500
    images, table = dataset(500, 32, 32, 2)
    indices = torch.randint(0, 500, (count,))
    targets = torch.randint(0, 10, (500,))
    options = {"seed": 9, "epoch": 5, "padding": 4, "flip": True}
    out = batch_like(device, count, images, dtype)
    targets_out = torch.empty(count, dtype=torch.int64, device=device.torch)
    moved = [part.to(device.torch) for part in (images, indices, table)]
    stage_images(
        *moved,
        targets=targets.to(device.torch),
        out=out,
        targets_out=targets_out,
        **options,
    )  # type: ignore[arg-type]
    on_cpu = torch.empty(out.shape, dtype=dtype, memory_format=torch.channels_last)
    with device.cpu_kernels():
        stage_images(images, indices, table, out=on_cpu, **options)  # type: ignore[arg-type]
    assert torch.equal(out.cpu(), on_cpu)
    assert torch.equal(targets_out.cpu(), targets[indices])


@pytest.mark.sanitizer
def test_an_output_that_is_not_aligned(device: KernelDevice) -> None:
    images, table = dataset(6, 8, 8, 1)
    moved = [part.to(device.torch) for part in (images, torch.arange(6), table)]
    for offset in range(1, 5):
        storage = torch.zeros(offset + 6 * 64, device=device.torch)
        out = storage[offset:].view(6, 1, 8, 8)
        stage_images(*moved, padding=2, flip=True, out=out)
        assert torch.equal(
            out.cpu(), stage_images_twin(images, range(6), table, padding=2, flip=True)
        )
        assert not storage[:offset].any()


@pytest.mark.sanitizer
def test_an_index_that_is_not_there_is_not_a_number(device: KernelDevice) -> None:
    images, table = (part.to(device.torch) for part in dataset(3, 8, 8, 3))
    indices = torch.tensor([0, 3, -1, 2], device=device.torch)
    targets = torch.arange(3, device=device.torch)
    out, targets_out = stage_images(images, indices, table, targets=targets)
    assert targets_out is not None
    assert targets_out.tolist() == [0, -1, -1, 2]
    assert out.isnan().flatten(1).all(dim=1).tolist() == [False, True, True, False]
    tokens = torch.arange(15, device=device.torch).reshape(3, 5)
    rows, following = stage_tokens(tokens, indices)
    assert following is not None
    assert rows[1].tolist() == following[2].tolist() == [-1] * 4
    assert rows[3].tolist() == [10, 11, 12, 13]


def test_token_blocks_that_take_several_turns(device: KernelDevice) -> None:
    """The grid has at most 65536 blocks of 256 tokens."""
    batch = 17_000 if device.torch.type == "cuda" else 20
    tokens = torch.randint(0, 50_257, (30, 1001))
    indices = torch.randint(0, 30, (batch,))
    with device.few_blocks("tokens_kernel", 3):
        out, following = stage_tokens(tokens.to(device.torch), indices.to(device.torch))
    assert following is not None
    assert torch.equal(out.cpu(), tokens[indices, :-1])
    assert torch.equal(following.cpu(), tokens[indices, 1:])


def test_one_kernel(device: KernelDevice) -> None:
    images, table = (part.to(device.torch) for part in dataset(50, 32, 32, 3))
    indices = torch.arange(50, device=device.torch)
    out = batch_like(device, 50, images)
    launched = device.launched(
        lambda: stage_images(images, indices, table, padding=4, flip=True, out=out)
    )
    assert len(launched) == 1, launched


def test_a_captured_call_moves_on_by_its_cursor(device: KernelDevice) -> None:
    images, table = dataset(40, 16, 16, 3)
    indices = torch.randperm(40)
    moved = [part.to(device.torch) for part in (images, indices, table)]
    out = batch_like(device, 8, images)
    cursor = torch.tensor([2, 0], device=device.torch)
    options = {"seed": 3, "padding": 4, "flip": True}

    def run() -> None:
        stage_images(*moved, cursor=cursor, out=out, **options)  # type: ignore[arg-type]

    run()
    replay = device.captured(run)
    for batch in range(5):
        replay()
        chosen = indices[8 * batch : 8 * batch + 8].tolist()
        epoch = 2 + batch
        assert torch.equal(
            out.cpu(), stage_images_twin(images, chosen, table, epoch=epoch, **options)
        )  # type: ignore[arg-type]
        cursor += torch.tensor([1, 8], device=device.torch)
    replay()  # past the end
    assert out.isnan().all()
