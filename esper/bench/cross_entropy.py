"""Cases of `cross_entropy`: loss, correct predictions and gradient, against equivalent public calls."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from esper.bench.case import BenchArgs, BenchCase, Sizes, dtype_name
from esper.bench.profiling import peak_megabytes
from esper.ops import Accumulators, accumulate_, cross_entropy, cross_entropy_into

NAME = "cross-entropy"
SIZES = Sizes("SAMPLESxCLASSES", ((512, 10), (128, 10), (512, 100), (64, 50_257)), seconds=2.0)

_BAR, _BAR_SIZE = 2.0, (512, 10)  # min ratio, on one CPU thread
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
            size, baseline = f"{rows} x {classes:,} {dtype_name(dtype)}", "F.cross_entropy + argmax + eq + sum"
            bar = _BAR if device.type == "cpu" and (rows, classes) == _BAR_SIZE else None

            own, other = partial(_with_backward, leaf, targets, sums), partial(_public, leaf, targets, backward=True)
            yield BenchCase(f"{NAME}: with backward", size, device, baseline, own, other, bar)
            into = partial(cross_entropy_into, logits, targets, sums, 0, first=0)
            public = partial(_public, logits, targets, backward=False)
            yield BenchCase(f"{NAME}: no gradient, into blocks", size, device, baseline, into, public, bar)
            if classes >= _MANY_CLASSES:
                peaks = [partial(peak_megabytes, run, device) for run in (own, other)]
                case = f"{NAME}: peak memory with backward"
                yield BenchCase(case, size, device, baseline, peaks[0], peaks[1], 1.0, "MB", turns=1)
