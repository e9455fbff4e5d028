"""Cases of `stage_batch`: a training batch of images, against torchvision's transforms and a copy of the same bytes."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from esper.bench.request import BenchArgs, SizeForm
from esper.bench.runner import BenchCase
from esper.hosts.torchvision_shim import import_torchvision
from esper.ops import normalisation_table, stage_images

NAME = "stage-batch"

SIZE = SizeForm(("images", "side"), "512x32")
DEFAULT_SIZES = ((128, 32), (512, 32))
CUDA_SIZES = ((512, 32), (16_384, 32))

MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.247, 0.2435, 0.2616)
PADDING = 4
_DATASET = 2000

_BAR_CPU = 4.0  # over torchvision one sample at a time, one thread
_BAR_CUDA = 0.7  # of the speed of a copy, from _LARGE bytes on; smaller batches measure the launch
_LARGE = 64_000_000


def torchvision_pipeline(side: int) -> Any:
    """Random crop, flip, cast and normalisation by torchvision's v2 transforms, for one image or a batch."""
    v2 = import_torchvision("torchvision.transforms.v2")
    return v2.Compose(
        [
            v2.RandomCrop(side, padding=PADDING),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(MEAN, STD),
        ]
    )


def comparisons(request: BenchArgs) -> Iterator[BenchCase]:
    """Yields all comparisons. Those on the CPU need torchvision."""
    for device in request.devices:
        for batch, side in request.sizes or (DEFAULT_SIZES if device.type == "cpu" else CUDA_SIZES):
            for dtype in (torch.float32, torch.bfloat16):
                if device.type == "cpu":
                    yield from _on_cpu(batch, side, dtype, request.seed)
                else:
                    yield _on_cuda(device, batch, side, dtype, request.seed)


def _dataset(side: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (_DATASET, side, side, 3), dtype=torch.uint8, generator=generator).to(device)
    return images, normalisation_table(MEAN, STD, device=device)


def _on_cpu(batch: int, side: int, dtype: torch.dtype, seed: int) -> Iterator[BenchCase]:
    images, table = _dataset(side, seed, torch.device("cpu"))
    planes = images.permute(0, 3, 1, 2).contiguous()  # [N, C, H, W], as torchvision expects
    indices = torch.randint(0, _DATASET, (batch,), generator=torch.Generator().manual_seed(seed))
    out = torch.empty((batch, 3, side, side), dtype=dtype, memory_format=torch.channels_last)
    pipeline = torchvision_pipeline(side)

    def ours() -> None:
        stage_images(images, indices, table, seed=seed, padding=PADDING, flip=True, out=out)

    def each() -> None:
        out.copy_(torch.stack([pipeline(planes[index]) for index in indices.tolist()]))

    def together() -> None:
        out.copy_(pipeline(planes[indices]))

    size = f"{batch} x 3 x {side} x {side} {str(dtype).removeprefix('torch.')}"
    case = f"{NAME}: crop, flip, normalise"
    yield BenchCase(case, size, images.device, "torchvision v2, each sample", ours, each, _BAR_CPU)
    yield BenchCase(case, size, images.device, "torchvision v2, one crop for all", ours, together, None)


def _on_cuda(device: torch.device, batch: int, side: int, dtype: torch.dtype, seed: int) -> BenchCase:
    images, table = _dataset(side, seed, device)
    indices = torch.randint(0, _DATASET, (batch,), generator=torch.Generator().manual_seed(seed)).to(device)
    out = torch.empty((batch, 3, side, side), dtype=dtype, device=device, memory_format=torch.channels_last)
    moved = out.numel() * (1 + out.element_size())  # bytes read and written
    source = torch.zeros(moved // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def ours() -> None:
        stage_images(images, indices, table, seed=seed, padding=PADDING, flip=True, out=out)

    def copy() -> None:
        target.copy_(source)

    size = f"{batch} x 3 x {side} x {side} {str(dtype).removeprefix('torch.')}"
    bar = _BAR_CUDA if moved >= _LARGE else None
    case = f"{NAME}: crop, flip, normalise"
    return BenchCase(case, size, device, "copy of the same bytes", ours, copy, bar)
