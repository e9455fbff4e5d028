"""Cases of `norm_relu_pool`: forward and backward of the blocks of a small host, against the three PyTorch modules."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.bench.request import BenchArgs, Size, SizeForm
from esper.bench.runner import BenchCase
from esper.ops import NormReluPool

NAME = "norm-relu-pool"

BATCH = 128

SIZE = SizeForm(("channels", "side"), "8x32")

# (channels, height and width) of the three blocks.
BLOCKS = ((8, 32), (16, 16), (32, 8))
CUDA_BATCH = 4096  # the first block is then 64 MB of bfloat16

# Min ratio of all blocks together on one CPU thread.
_BARS = {torch.bfloat16: 4.0, torch.float32: 1.8}


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


def _all(steps: Sequence[Callable[[], None]]) -> Callable[[], None]:
    def run() -> None:
        for step in steps:
            step()

    return run


def comparisons(request: BenchArgs) -> Iterator[BenchCase]:
    """Yields each block and all together. The bar is for one CPU thread."""
    for device in request.devices:
        yield from _on(device, request.sizes or BLOCKS, BATCH if device.type == "cpu" else CUDA_BATCH)


def _on(device: torch.device, sizes: Sequence[Size], batch: int) -> Iterator[BenchCase]:
    for dtype, bar in _BARS.items():
        name = f"{NAME}: forward + backward, {str(dtype).removeprefix('torch.')}"
        own: list[Callable[[], None]] = []
        other: list[Callable[[], None]] = []
        for channels, side in sizes:
            shape = (batch, channels, side, side)
            own.append(_training_step(NormReluPool(channels, pool=True), shape, dtype, device))
            other.append(_training_step(ThreeModules(channels), shape, dtype, device))
            size = f"{batch} x {channels} x {side} x {side}"
            yield BenchCase(name, size, device, "three modules", own[-1], other[-1], None)
        if tuple(sizes) == BLOCKS:
            yield BenchCase(
                name,
                "the three blocks",
                device,
                "three modules",
                _all(own),
                _all(other),
                bar if device.type == "cpu" else None,
            )
