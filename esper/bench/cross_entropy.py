"""Cases of `cross_entropy`: loss, correct predictions and gradient, against equivalent public calls."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from esper.bench.case import BenchArgs, BenchCase, Sizes, dtype_name
from esper.bench.profiling import peak_megabytes
from esper.ops.accumulators import Accumulators, accumulate_
from esper.ops.cross_entropy import cross_entropy, cross_entropy_into

NAME = "cross-entropy"
SIZES = Sizes(
    "SAMPLESxCLASSES",
    ((512, 10), (128, 10), (512, 100), (64, 50_257)),
    seconds=3.0,
)

_BAR = 2.0  # min ratio, on one CPU thread
_BAR_SIZE = (512, 10)
_MANY_CLASSES = 10_000  # from here on, peak memory is compared too


def public_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns ``(loss [], correct [B], number correct [])`` by public calls; computes in float32, as autocast does."""
    loss = F.cross_entropy(logits.float(), targets)
    correct = logits.argmax(dim=1) == targets
    return loss, correct, correct.sum()


def _public(logits: Tensor, targets: Tensor, backward: bool) -> None:
    with torch.set_grad_enabled(backward):
        loss, _, _ = public_loss(logits, targets)
    if backward:
        torch.autograd.grad(loss, logits)


def _with_backward(logits: Tensor, targets: Tensor, accumulators: Accumulators) -> None:
    result = cross_entropy(logits, targets)
    torch.autograd.grad(result.loss, logits)
    accumulate_(accumulators, 0, result.stats)


def comparisons(args: BenchArgs) -> Iterator[BenchCase]:
    """Yields the loss with and without its gradient; with many classes also the peak memory."""
    for device, (rows, classes) in SIZES.of(args):
        for dtype in (torch.float32, torch.bfloat16):
            generator = torch.Generator().manual_seed(0)
            logits = torch.randn(rows, classes, generator=generator).to(device, dtype)
            leaf = logits.clone().requires_grad_()
            targets = torch.randint(0, classes, (rows,), generator=generator).to(device)
            sums = Accumulators(1, samples=rows, device=device)

            bar = None
            if device.type == "cpu" and (rows, classes) == _BAR_SIZE:
                bar = _BAR
            with_backward = BenchCase(
                case=f"{NAME}: with backward",
                size=f"{rows} x {classes:,} {dtype_name(dtype)}",
                device=device,
                baseline="F.cross_entropy + argmax + eq + sum",
                run=partial(_with_backward, leaf, targets, sums),
                run_baseline=partial(_public, leaf, targets, backward=True),
                bar=bar,
            )
            yield with_backward
            yield replace(
                with_backward,
                case=f"{NAME}: no gradient, into blocks",
                run=partial(cross_entropy_into, logits, targets, sums, 0, first=0),
                run_baseline=partial(_public, logits, targets, backward=False),
            )
            if classes >= _MANY_CLASSES:
                yield replace(
                    with_backward,
                    case=f"{NAME}: peak memory with backward",
                    run=partial(peak_megabytes, with_backward.run, device),
                    run_baseline=partial(peak_megabytes, with_backward.run_baseline, device),
                    bar=1.0,
                    unit="MB",
                    turns=1,
                )
