"""Cases of `cross_entropy`: loss, correct predictions and gradient, against equivalent public calls."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from esper.bench.memory import peak_bytes
from esper.bench.request import BenchArgs, SizeForm
from esper.bench.runner import BenchCase
from esper.ops import Accumulators, accumulate_, cross_entropy, cross_entropy_into

NAME = "cross-entropy"
BASELINE = "F.cross_entropy + argmax + eq + sum"

SIZE = SizeForm(("samples", "classes"), "512x10")
DEFAULT_SIZES = ((512, 10), (128, 10), (512, 100), (64, 50_257))

# Min ratio on one CPU thread.
_BAR = 2.0
_BAR_SIZE = (512, 10)
_MANY_CLASSES = 10_000  # from here on, peak memory is compared too


def public_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns ``(loss [], correct [B], number correct [])`` by public calls; computes in float32, as autocast does."""
    loss = F.cross_entropy(logits.float(), targets)
    correct = logits.argmax(dim=1) == targets
    return loss, correct, correct.sum()


def comparisons(request: BenchArgs) -> Iterator[BenchCase]:
    """Yields all comparisons. Bars are for one CPU thread."""
    for device in request.devices:
        for rows, classes in request.sizes or DEFAULT_SIZES:
            for dtype in (torch.float32, torch.bfloat16):
                yield from _at(device, rows, classes, dtype, request.seed)


def _at(device: torch.device, rows: int, classes: int, dtype: torch.dtype, seed: int) -> Iterator[BenchCase]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, classes, generator=generator).to(device, dtype)
    leaf = logits.clone().requires_grad_()
    targets = torch.randint(0, classes, (rows,), generator=generator).to(device)
    accumulators = Accumulators(1, samples=rows, device=device)

    def ours() -> None:
        result = cross_entropy(leaf, targets)
        torch.autograd.grad(result.loss, leaf)
        accumulate_(accumulators, 0, result.stats)

    def public() -> None:
        loss, _, _ = public_loss(leaf, targets)
        torch.autograd.grad(loss, leaf)

    def ours_into() -> None:
        cross_entropy_into(logits, targets, accumulators, 0, first=0)

    def public_no_grad() -> None:
        with torch.no_grad():
            public_loss(logits, targets)

    name = str(dtype).removeprefix("torch.")
    size = f"{rows} x {classes:,} {name}"
    bar = _BAR if device.type == "cpu" and (rows, classes) == _BAR_SIZE else None
    for case, own, other in (("with backward", ours, public), ("no gradient, into blocks", ours_into, public_no_grad)):
        yield BenchCase(f"{NAME}: {case}", size, device, BASELINE, own, other, bar)
    if classes >= _MANY_CLASSES:
        yield BenchCase(
            f"{NAME}: peak memory with backward",
            size,
            device,
            BASELINE,
            lambda: peak_bytes(ours, device) / 1e6,
            lambda: peak_bytes(public, device) / 1e6,
            1.0,
            unit="MB",
            turns=1,
        )
