"""The CUDA kernels that stage batches: the bits of the CPU kernels, one launch. On a GPU or emulated."""

from itertools import product

import pytest
import torch
from torch import Tensor

from esper.ops.stage_batch import normalisation_table, stage_images, stage_tokens
from tests.cuda.cases import with_sanitizer
from tests.emulation.device import KernelDevice
from tests.ops.stage_batch_twin import stage_images_twin

DTYPES = (torch.float32, torch.bfloat16)


def dataset(n: int, height: int, width: int, channels: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(
        0, 256, (n, height, width, channels), dtype=torch.uint8, generator=generator
    )
    return images, normalisation_table(
        [0.4 + 0.02 * c for c in range(channels)], [0.25] * channels
    )


def batch_like(
    device: KernelDevice, batch: int, images: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    _, height, width, channels = images.shape
    shape = (batch, channels, height, width)
    return torch.empty(
        shape, dtype=dtype, device=device.torch, memory_format=torch.channels_last
    )


IMAGES = [
    (32, 32, 3),
    (8, 8, 1),
    (5, 7, 3),
    (3, 4, 4),
    (1, 1, 1),
    (6, 9, 2),
    (4, 4, 32),
    (224, 224, 3),
    (64, 64, 1),
]
SIZES = product(DTYPES, IMAGES, (0, 4), (False, True))
SANITIZED_SIZES = (
    (torch.float32, (5, 7, 3), 4, True),
    (torch.bfloat16, (3, 4, 4), 4, True),
    (torch.float32, (1, 1, 1), 0, False),
    (torch.bfloat16, (4, 4, 32), 4, True),
)


@pytest.mark.parametrize(
    ("dtype", "size", "padding", "flip"), with_sanitizer(SIZES, SANITIZED_SIZES)
)
def test_equals_the_twin(
    device: KernelDevice,
    dtype: torch.dtype,
    size: tuple[int, int, int],
    padding: int,
    flip: bool,
) -> None:
    number = 20 if size[0] < 100 else 3
    images, table = dataset(number, *size)
    indices = torch.randperm(number)
    out = batch_like(device, number, images, dtype)
    moved = [part.to(device.torch) for part in (images, indices, table)]
    for seed, epoch in ((0, 0), (-1, 2**40), (2**63 - 1, -5)):
        options = {"seed": seed, "epoch": epoch, "padding": padding, "flip": flip}
        stage_images(*moved, out=out, **options)  # type: ignore[arg-type]
        expected = stage_images_twin(
            images, indices.tolist(), table, dtype=dtype, **options
        )  # type: ignore[arg-type]
        assert torch.equal(out.cpu(), expected)


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


@pytest.mark.parametrize(
    "dtype",
    [
        torch.int64,
        torch.int32,
        pytest.param(torch.uint16, marks=pytest.mark.sanitizer),
        torch.uint8,
    ],
)
def test_tokens(device: KernelDevice, dtype: torch.dtype) -> None:
    tokens = torch.randint(0, 256 if dtype == torch.uint8 else 50_257, (300, 1025))
    indices = torch.randint(0, 300, (200,))
    out, following = stage_tokens(
        tokens.to(device.torch, dtype), indices.to(device.torch)
    )
    assert following is not None
    assert torch.equal(out.cpu(), tokens[indices, :-1])
    assert torch.equal(following.cpu(), tokens[indices, 1:])


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


@pytest.mark.sanitizer
def test_empty_batches(device: KernelDevice) -> None:
    images, table = (part.to(device.torch) for part in dataset(3, 8, 8, 3))
    nothing = torch.empty(0, dtype=torch.int64, device=device.torch)
    assert stage_images(images, nothing, table)[0].shape == (0, 3, 8, 8)
    assert stage_tokens(
        torch.zeros(3, 5, dtype=torch.int64, device=device.torch), nothing
    )[0].shape == (0, 4)


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
