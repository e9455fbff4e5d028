"""Cases of `norm_relu_pool`: forward and backward of the blocks of a small host, against the three PyTorch modules."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.bench.case import BenchArgs, BenchCase, Size, Sizes
from esper.ops import NormReluPool

NAME = "norm-relu-pool"
BLOCKS = ((8, 32), (16, 16), (32, 8))
SIZES = Sizes("CHANNELSxSIDE", BLOCKS)

BATCH, CUDA_BATCH = 128, 4096  # on a GPU, the first block is 64 MB of bfloat16
_BARS = {torch.bfloat16: 4.0, torch.float32: 1.8}  # min ratio of all blocks together, on one CPU thread


class ThreeModules(nn.BatchNorm2d):
    """The modules that `NormReluPool` replaces."""

    def forward(self, input: Tensor) -> Tensor:
        """``[N, C, H, W]`` to ``[N, C, H // 2, W // 2]``."""
        return F.max_pool2d(F.relu(super().forward(input)), 2)


def _training_step(
    module: nn.Module, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
) -> Callable[[], None]:
    """Returns one forward and backward pass in training mode, on the same values for every module."""
    generator = torch.Generator().manual_seed(0)
    module = module.to(device)
    x = torch.randn(shape, generator=generator).to(device, dtype).to(memory_format=torch.channels_last).requires_grad_()
    pooled = (shape[0], shape[1], shape[2] // 2, shape[3] // 2)
    gradient = torch.randn(pooled, generator=generator).to(device, dtype).to(memory_format=torch.channels_last)

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


def _on(device: torch.device, sizes: Sequence[Size], dtype: torch.dtype) -> Iterator[BenchCase]:
    on_cpu = device.type == "cpu"
    batch = BATCH if on_cpu else CUDA_BATCH
    name, baseline = f"{NAME}: forward + backward, {str(dtype).removeprefix('torch.')}", "three modules"
    own: list[Callable[[], None]] = []
    other: list[Callable[[], None]] = []
    for channels, side in sizes:
        shape = (batch, channels, side, side)
        own.append(_training_step(NormReluPool(channels, pool=True), shape, dtype, device))
        other.append(_training_step(ThreeModules(channels), shape, dtype, device))
        yield BenchCase(name, " x ".join(map(str, shape)), device, baseline, own[-1], other[-1])
    if tuple(sizes) == BLOCKS:
        bar = _BARS[dtype] if on_cpu else None
        yield BenchCase(name, "the three blocks", device, baseline, partial(_all, own), partial(_all, other), bar)
