"""Cases of `norm_relu_pool`: forward and backward of the blocks of a small host, against the three PyTorch modules."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.bench.case import BenchArgs, BenchCase, Size, Sizes, dtype_name
from esper.ops import NormReluPool

NAME = "norm-relu-pool"
BLOCKS = ((8, 32), (16, 16), (32, 8))
SIZES = Sizes("CHANNELSxSIDE", BLOCKS, seconds=10.0)

BATCH, CUDA_BATCH = 128, 4096  # on a GPU, the first block is 64 MB of bfloat16
_BARS = {torch.bfloat16: 4.0, torch.float32: 1.8}  # min ratio of all blocks together, on one CPU thread


class ThreeModules(nn.BatchNorm2d):
    """The modules that `NormReluPool` replaces."""

    def forward(self, input: Tensor) -> Tensor:
        """``[N, C, H, W]`` to ``[N, C, H // 2, W // 2]``."""
        return F.max_pool2d(F.relu(super().forward(input)), 2)


def _training_step(
    module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Callable[[], None]:
    """Returns one forward and backward pass in training mode, on the same values for every module."""
    generator, module = torch.Generator().manual_seed(0), module.to(device)
    pooled = (*shape[:2], shape[2] // 2, shape[3] // 2)
    x, gradient = (
        torch.randn(size, generator=generator).to(device, dtype).to(memory_format=torch.channels_last)
        for size in (shape, pooled)
    )
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
    batch = BATCH if device.type == "cpu" else CUDA_BATCH
    name, baseline = f"{NAME}: forward + backward, {dtype_name(dtype)}", "three modules"
    sides: list[tuple[Callable[[], None], Callable[[], None]]] = []
    for channels, side in sizes:
        shape = (batch, channels, side, side)
        modules = NormReluPool(channels, pool=True), ThreeModules(channels)
        own, other = (_training_step(module, shape, dtype, device) for module in modules)
        sides.append((own, other))
        yield BenchCase(name, " x ".join(map(str, shape)), device, baseline, own, other)
    if sizes == BLOCKS:
        own, other = (partial(_all, steps) for steps in zip(*sides, strict=True))
        bar = _BARS[dtype] if device.type == "cpu" else None
        yield BenchCase(name, "the three blocks", device, baseline, own, other, bar)
