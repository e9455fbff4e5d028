"""Cases of `norm_relu_pool`: forward and backward of the blocks of a small host, against the three PyTorch modules."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.bench.case import BenchArgs, BenchCase, Size, Sizes, dtype_name
from esper.ops.norm_relu_pool import NormReluPool

NAME = "norm-relu-pool"
BLOCKS = ((8, 32), (16, 16), (32, 8))
SIZES = Sizes("CHANNELSxSIDE", BLOCKS, seconds=2.0)

BATCH = 128
CUDA_BATCH = 4096  # on a GPU, the first block is 64 MB of bfloat16
_BARS = {torch.bfloat16: 4.0, torch.float32: 1.8}  # min ratio of all blocks together, on one CPU thread


class ThreeModules(nn.BatchNorm2d):
    """The modules that `NormReluPool` replaces."""

    def forward(self, input: Tensor) -> Tensor:
        """``[N, C, H, W]`` to ``[N, C, H // 2, W // 2]``."""
        return F.max_pool2d(F.relu(super().forward(input)), 2)


def _training_step(
    module: nn.Module,
    shape: Size,
    dtype: torch.dtype,
    device: torch.device,
) -> Callable[[], None]:
    """Returns one forward and backward pass in training mode, on the same values for every module."""
    generator = torch.Generator().manual_seed(0)
    module = module.to(device)

    def draw(size: Size) -> Tensor:
        values = torch.randn(size, generator=generator).to(device, dtype)
        return values.to(memory_format=torch.channels_last)

    batch, channels, height, width = shape
    x = draw(shape)
    gradient = draw((batch, channels, height // 2, width // 2))
    x.requires_grad_()

    def step() -> None:
        x.grad = None
        module.zero_grad(set_to_none=True)
        module(x).backward(gradient)

    return step


def _all(steps: Sequence[Callable[[], None]]) -> None:
    for step in steps:
        step()


def comparisons(args: BenchArgs) -> Iterator[BenchCase]:
    """Yields each block and all together. The bar is for one CPU thread."""
    for device in args.devices:
        for dtype in _BARS:
            yield from _on(device, args.sizes or BLOCKS, dtype)


def _on(device: torch.device, sizes: tuple[Size, ...], dtype: torch.dtype) -> Iterator[BenchCase]:
    batch = CUDA_BATCH
    bar = None
    if device.type == "cpu":
        batch = BATCH
        bar = _BARS[dtype]

    own_steps = []
    other_steps = []
    for channels, side in sizes:
        shape = (batch, channels, side, side)
        own = _training_step(NormReluPool(channels, pool=True), shape, dtype, device)
        other = _training_step(ThreeModules(channels), shape, dtype, device)
        block = BenchCase(
            case=f"{NAME}: forward + backward, {dtype_name(dtype)}",
            size=" x ".join(map(str, shape)),
            device=device,
            baseline="three modules",
            run=own,
            run_baseline=other,
        )
        yield block
        own_steps.append(own)
        other_steps.append(other)

    if sizes == BLOCKS:
        yield replace(
            block,
            size="the three blocks",
            run=partial(_all, own_steps),
            run_baseline=partial(_all, other_steps),
            bar=bar,
        )
