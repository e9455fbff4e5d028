"""Cases of `grad_stats`: all statistics, and the norm alone, against public PyTorch calls."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from esper.bench.case import BenchArgs, BenchCase, Sizes
from esper.ops.grad_stats import grad_stats

NAME = "grad-stats"
_SMALL_SIZES = ((11, 48), (100, 48), (1000, 48))
SIZES = Sizes(
    "TENSORSxELEMENTS",
    (*_SMALL_SIZES, (20, 100_000)),
    cuda=(*_SMALL_SIZES, (20, 550_000)),
    seconds=3.0,
)

# Min ratios on one CPU thread, by number of small tensors.
_BARS_ALL = {100: 20.0, 1000: 20.0}
_BARS_NORM = {11: 4.0, 100: 6.0, 1000: 6.0}
_SMALL = 1000  # elements; larger tensors are bound by memory bandwidth, and the bar is "not slower"


def public_statistics(
    gradients: Sequence[Tensor],
    joined: bool = True,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Returns the same statistics ``[13]`` of one group by public PyTorch calls, none of which waits for the device.

    ``joined`` counts on one concatenation of all gradients, the fastest known public way for many small ones; otherwise
    each gradient is counted in place. Norms need ``dtype`` float64 to be the same statistics: float32 is faster, but
    overflows above 1e19. The bar applies to gradients counted in place; the other variants are only reported.
    """
    norms = torch.stack([torch.linalg.vector_norm(gradient, dtype=dtype) for gradient in gradients])  # [N]
    sum_sq = norms.square().sum()
    norm = sum_sq.sqrt()
    vanishing = (norms < 1e-7).sum()
    exploding = ((norms > 10.0) | ~norms.isfinite()).sum()

    parts = gradients
    if joined:
        parts = [torch.cat([gradient.flatten() for gradient in gradients])]
    nan = torch.stack([part.isnan().sum() for part in parts]).sum()
    inf = torch.stack([part.isinf().sum() for part in parts]).sum()
    zero = torch.stack([(part == 0).sum() for part in parts]).sum()

    count = len(gradients)
    penalty = (0.5 * vanishing + 0.8 * exploding) / count
    health = torch.where(norm.isfinite(), (1 - penalty).clamp(0, 1), 0.0)
    # As torch.nn.utils.clip_grad_norm_ does, to a norm of 1.
    scale = (1.0 / (norm + 1e-6)).clamp(max=1)
    clip = torch.where(norm.isfinite(), scale, 0.0)
    elements = sum(gradient.numel() for gradient in gradients)
    smallest, largest = norms.aminmax()
    statistics = [
        sum_sq,
        norm,
        norm.new_full((), count),
        norm.new_full((), elements),
        smallest,
        largest,
        vanishing,
        exploding,
        nan,
        inf,
        zero,
        health,
        clip,
    ]
    return torch.stack([value.double() for value in statistics])


def comparisons(args: BenchArgs) -> Iterator[BenchCase]:
    """Yields all statistics and the norm alone. Bars are for one CPU thread."""
    generator = torch.Generator().manual_seed(0)
    for device, (count, elements) in SIZES.of(args):
        gradients = [torch.randn(elements, generator=generator).to(device) for _ in range(count)]
        out = grad_stats([gradients])
        bar_all, bar_norm = _bars(device, count, elements)
        counted_each = BenchCase(
            case=f"{NAME}: all statistics",
            size=f"{count} x {elements:,}",
            device=device,
            baseline="public calls, each",
            run=partial(grad_stats, [gradients]),
            run_baseline=partial(public_statistics, gradients, joined=False),
            bar=bar_all,
        )
        yield counted_each
        yield replace(
            counted_each,
            baseline="public calls, joined",
            run_baseline=partial(public_statistics, gradients),
            bar=None,
        )
        yield replace(
            counted_each,
            baseline="public calls, joined, float32",
            run_baseline=partial(public_statistics, gradients, dtype=torch.float32),
            bar=None,
        )
        yield replace(
            counted_each,
            case=f"{NAME}: all statistics, out=",
            run=partial(grad_stats, [gradients], out=out),
        )
        yield replace(
            counted_each,
            baseline="get_total_norm (norm only)",
            run_baseline=partial(get_total_norm, gradients),
            bar=bar_norm,
        )


def _bars(device: torch.device, count: int, elements: int) -> tuple[float | None, float | None]:
    """Returns the bars of all statistics and of the norm alone."""
    if device.type != "cpu":
        return None, None
    if elements > _SMALL:
        return None, 1.0
    return _BARS_ALL.get(count), _BARS_NORM.get(count, 1.0)
