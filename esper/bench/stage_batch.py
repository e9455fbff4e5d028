"""Cases of `stage_batch`: a training batch of images, against torchvision's transforms and a copy of the same bytes."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from esper.bench.case import BenchArgs, BenchCase, Sizes, dtype_name
from esper.hosts.torchvision_shim import import_torchvision
from esper.ops.stage_batch import normalisation_table, stage_images

NAME = "stage-batch"
SIZES = Sizes(
    "IMAGESxSIDE",
    ((128, 32), (512, 32)),
    cuda=((512, 32), (16_384, 32)),
    seconds=3.0,
)

MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.247, 0.2435, 0.2616)
PADDING = 4
_DATASET = 2000

_BAR_CPU = 4.0  # over torchvision one sample at a time, one thread
_BAR_CUDA = 0.7  # of the speed of a copy, from _LARGE bytes on; smaller batches measure the launch
_LARGE = 64_000_000


def torchvision_pipeline(side: int) -> Any:
    """Returns random crop, flip, cast and normalisation by torchvision's v2 transforms, for one image or a batch."""
    v2 = import_torchvision("torchvision.transforms.v2")
    return v2.Compose(
        [
            v2.RandomCrop(side, padding=PADDING),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(MEAN, STD),
        ]
    )


def _each(pipeline: Any, planes: Tensor, indices: Tensor, out: Tensor) -> None:
    out.copy_(torch.stack([pipeline(planes[index]) for index in indices.tolist()]))


def _together(pipeline: Any, planes: Tensor, indices: Tensor, out: Tensor) -> None:
    out.copy_(pipeline(planes[indices]))


def comparisons(args: BenchArgs) -> Iterator[BenchCase]:
    """Yields both dtypes at each size. Comparisons on the CPU need torchvision."""
    for device, (batch, side) in SIZES.of(args):
        generator = torch.Generator().manual_seed(0)
        shape = (_DATASET, side, side, 3)
        images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).to(device)
        indices = torch.randint(0, _DATASET, (batch,), generator=generator).to(device)
        table = normalisation_table(MEAN, STD, device=device)
        for dtype in (torch.float32, torch.bfloat16):
            out = torch.empty((batch, 3, side, side), dtype=dtype, device=device, memory_format=torch.channels_last)
            ours = partial(stage_images, images, indices, table, padding=PADDING, flip=True, out=out)
            case = f"{NAME}: crop, flip, normalise"
            size = f"{batch} x 3 x {side} x {side} {dtype_name(dtype)}"
            if device.type == "cpu":
                pipeline = torchvision_pipeline(side)
                planes = images.permute(0, 3, 1, 2).contiguous()  # torchvision expects [N, C, H, W]
                each = partial(_each, pipeline, planes, indices, out)
                together = partial(_together, pipeline, planes, indices, out)
                yield BenchCase(case, size, device, "torchvision v2, each sample", ours, each, _BAR_CPU)
                yield BenchCase(case, size, device, "torchvision v2, one crop for all", ours, together)
            else:
                moved = out.numel() * (1 + out.element_size())  # bytes read and written
                source = torch.zeros(moved // 2, dtype=torch.uint8, device=device)
                copy = partial(torch.empty_like(source).copy_, source)
                bar = _BAR_CUDA if moved >= _LARGE else None
                yield BenchCase(case, size, device, "copy of the same bytes", ours, copy, bar)
