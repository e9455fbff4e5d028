"""Staging on CUDA: the bits of the CPU, one launch, no sync, safe in a replayed graph."""

import pytest
import torch
from torch import Tensor

from esper.ops import normalisation_table, stage_images, stage_tokens
from tests.ops.stage_batch_twin import stage_images_twin

pytestmark = pytest.mark.cuda

DTYPES = (torch.float32, torch.bfloat16)


def dataset(n: int, height: int, width: int, channels: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (n, height, width, channels), dtype=torch.uint8, generator=generator)
    return images, normalisation_table([0.4 + 0.02 * c for c in range(channels)], [0.25] * channels)


def batch_like(batch: int, images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    _, height, width, channels = images.shape
    shape = (batch, channels, height, width)
    return torch.empty(shape, dtype=dtype, device="cuda", memory_format=torch.channels_last)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "size", [(32, 32, 3), (8, 8, 1), (5, 7, 3), (3, 4, 4), (1, 1, 1), (6, 9, 2), (4, 4, 32), (224, 224, 3), (64, 64, 1)]
)
@pytest.mark.parametrize(("padding", "flip"), [(0, False), (4, False), (0, True), (4, True)])
def test_equals_the_twin(dtype: torch.dtype, size: tuple[int, int, int], padding: int, flip: bool) -> None:
    images, table = dataset(20, *size)
    indices = torch.randperm(20)
    out = batch_like(20, images, dtype)
    for seed, epoch in ((0, 0), (-1, 2**40), (2**63 - 1, -5)):
        options = {"seed": seed, "epoch": epoch, "padding": padding, "flip": flip}
        stage_images(images.cuda(), indices.cuda(), table.cuda(), out=out, **options)  # type: ignore[arg-type]
        expected = stage_images_twin(images, indices.tolist(), table, dtype=dtype, **options)  # type: ignore[arg-type]
        assert torch.equal(out.cpu(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bits_of_the_cpu_for_a_large_batch(dtype: torch.dtype) -> None:
    images, table = dataset(500, 32, 32, 3)
    indices = torch.randint(0, 500, (20_000,))
    targets = torch.randint(0, 10, (500,))
    options = {"seed": 9, "epoch": 5, "padding": 4, "flip": True}
    out = batch_like(20_000, images, dtype)
    targets_out = torch.empty(20_000, dtype=torch.int64, device="cuda")
    stage_images(
        images.cuda(), indices.cuda(), table.cuda(), targets=targets.cuda(), out=out, targets_out=targets_out, **options
    )  # type: ignore[arg-type]
    on_cpu = torch.empty(out.shape, dtype=dtype, memory_format=torch.channels_last)
    stage_images(images, indices, table, out=on_cpu, **options)  # type: ignore[arg-type]
    assert torch.equal(out.cpu(), on_cpu)
    assert torch.equal(targets_out.cpu(), targets[indices])


def test_an_output_that_is_not_aligned() -> None:
    images, table = dataset(6, 8, 8, 1)
    for offset in range(1, 5):
        storage = torch.zeros(offset + 6 * 64, device="cuda")
        out = storage[offset:].view(6, 1, 8, 8)
        stage_images(images.cuda(), torch.arange(6, device="cuda"), table.cuda(), padding=2, flip=True, out=out)
        assert torch.equal(out.cpu(), stage_images_twin(images, range(6), table, padding=2, flip=True))
        assert not storage[:offset].any()


def test_an_index_that_is_not_there_is_not_a_number() -> None:
    images, table = (part.cuda() for part in dataset(3, 8, 8, 3))
    indices = torch.tensor([0, 3, -1, 2], device="cuda")
    targets = torch.arange(3, device="cuda")
    out, targets_out = stage_images(images, indices, table, targets=targets)
    assert targets_out is not None
    assert targets_out.tolist() == [0, -1, -1, 2]
    assert out.isnan().flatten(1).all(dim=1).tolist() == [False, True, True, False]
    tokens = torch.arange(15, device="cuda").reshape(3, 5)
    rows, following = stage_tokens(tokens, indices)
    assert following is not None
    assert rows[1].tolist() == following[2].tolist() == [-1] * 4
    assert rows[3].tolist() == [10, 11, 12, 13]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint16, torch.uint8])
def test_tokens(dtype: torch.dtype) -> None:
    tokens = torch.randint(0, 256 if dtype == torch.uint8 else 50_257, (300, 1025))
    indices = torch.randint(0, 300, (200,))
    out, following = stage_tokens(tokens.to(dtype).cuda(), indices.cuda())
    assert following is not None
    assert torch.equal(out.cpu(), tokens[indices, :-1])
    assert torch.equal(following.cpu(), tokens[indices, 1:])


def test_empty_batches() -> None:
    images, table = (part.cuda() for part in dataset(3, 8, 8, 3))
    nothing = torch.empty(0, dtype=torch.int64, device="cuda")
    assert stage_images(images, nothing, table)[0].shape == (0, 3, 8, 8)
    assert stage_tokens(torch.zeros(3, 5, dtype=torch.int64, device="cuda"), nothing)[0].shape == (0, 4)


def test_one_kernel_and_no_sync() -> None:
    images, table = (part.cuda() for part in dataset(50, 32, 32, 3))
    indices = torch.arange(50, device="cuda")
    out = batch_like(50, images)
    stage_images(images, indices, table, padding=4, flip=True, out=out)
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        stage_images(images, indices, table, padding=4, flip=True, out=out)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        stage_images(images, indices, table, padding=4, flip=True, out=out)
        torch.cuda.synchronize()
    kernels = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(kernels) == 1, [event.name for event in kernels]


def test_a_captured_graph_moves_on_by_its_cursor() -> None:
    images, table = dataset(40, 16, 16, 3)
    on_gpu, gpu_table = images.cuda(), table.cuda()
    indices = torch.randperm(40)
    gpu_indices = indices.cuda()
    out = batch_like(8, images)
    cursor = torch.tensor([2, 0], device="cuda")
    step = torch.tensor([0, 8], device="cuda")
    options = {"seed": 3, "padding": 4, "flip": True}
    stage_images(on_gpu, gpu_indices, gpu_table, cursor=cursor, out=out, **options)  # type: ignore[arg-type]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stage_images(on_gpu, gpu_indices, gpu_table, cursor=cursor, out=out, **options)  # type: ignore[arg-type]
        cursor.add_(step)
    for batch in range(5):
        graph.replay()
        chosen = indices[8 * batch : 8 * batch + 8].tolist()
        assert torch.equal(out.cpu(), stage_images_twin(images, chosen, table, epoch=2, **options))  # type: ignore[arg-type]
    graph.replay()  # past the end
    assert out.isnan().all()


def test_tensors_on_two_devices_are_refused() -> None:
    images, table = dataset(3, 8, 8, 3)
    with pytest.raises(RuntimeError, match="stage_images: table is on another device than the dataset"):
        stage_images(images.cuda(), torch.arange(3, device="cuda"), table)
