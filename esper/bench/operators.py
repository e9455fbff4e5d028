"""Cases of the compiled operators, each against equivalent public calls. Bars are for one CPU thread."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from esper.bench.case import BenchArgs, BenchPair, Case, Size, dtype_name
from esper.hosts.zoo import import_torchvision
from esper.ops.accumulators import Accumulators, accumulate_
from esper.ops.cross_entropy import cross_entropy, cross_entropy_into
from esper.ops.grad_stats import VANISHING_NORM, grad_stats
from esper.ops.norm_relu_pool import NormReluPool
from esper.ops.optimizer import SGD, AdamW, FusedOptimizer, step_all
from esper.ops.stage_batch import normalisation_table, stage_images

DTYPES = (torch.float32, torch.bfloat16)


def drawing(device: torch.device) -> Callable[..., Tensor]:
    """Returns a function that draws standard normal numbers of a shape, the same numbers for every device."""
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator).to(device)


# sgd, adamw: the step of a host and three seeds in one call, against one fused step of torch.optim each.

OPTIMIZERS = 4
LR = 1e-4
MOMENTUM = 0.9
DECAY = 5e-4


def sgd(args: BenchArgs, device: torch.device, size: Size) -> Iterator[BenchPair]:
    """Yields the clipped step."""
    own = [SGD(vectors, LR, MOMENTUM, weight_decay=DECAY) for vectors in parameters(device, size)]
    make = partial(torch.optim.SGD, lr=LR, momentum=MOMENTUM, weight_decay=DECAY, fused=True)
    yield _clipped_step("sgd", size, own, make)


def adamw(args: BenchArgs, device: torch.device, size: Size) -> Iterator[BenchPair]:
    """Yields the clipped step; weights do not decay, as Esper's AdamW does not decay vectors."""
    rate = torch.tensor(LR, device=device)
    own = [AdamW(vectors, rate) for vectors in parameters(device, size)]
    make = partial(torch.optim.AdamW, lr=LR, weight_decay=0.0, fused=True)
    yield _clipped_step("adamw", size, own, make)


def _clipped_step(
    name: str,
    size: Size,
    own: Sequence[FusedOptimizer],
    make: Callable[..., Optimizer],
) -> BenchPair:
    """Compares the step with torch's optimizers; both sides use the clip coefficients of the same `grad_stats`."""
    coefficient = grad_stats(map(_gradients, own)).clip_coef
    other = [make(vectors) for vectors in parameters(coefficient.device, size)]
    return BenchPair(
        case=f"{name}: clipped step",
        size=f"{OPTIMIZERS} x {size[0]} x {size[1]:,}",
        device=coefficient.device,
        baseline=f"torch.optim.{type(other[0]).__name__}, fused, each",
        run=partial(step_all, own, coefficient),
        run_baseline=partial(torch_steps, other, coefficient),
    )


def _gradients(optimizer: Optimizer) -> list[Tensor | None]:
    return [vector.grad for group in optimizer.param_groups for vector in group["params"]]


def parameters(device: torch.device, size: Size) -> Iterator[list[nn.Parameter]]:
    """Yields the vectors of each optimizer: random numbers with random gradients, the same at each call."""
    count, elements = size
    for _ in range(OPTIMIZERS):
        draw = drawing(device)
        vectors = [nn.Parameter(draw(elements)) for _ in range(count)]
        for vector in vectors:
            vector.grad = draw(elements)
        yield vectors


def torch_steps(optimizers: Sequence[Optimizer], coefficient: Tensor) -> None:
    """Steps each fused optimizer with its gradients multiplied by ``coefficient`` [G]; skips those with 0 or NaN."""
    usable = coefficient > 0
    scale = torch.where(usable, 1 / coefficient, 1.0).float()
    found_inf = (~usable).float()
    for index, optimizer in enumerate(optimizers):
        # The same attributes by which torch.amp.GradScaler scales and skips the steps of fused optimizers.
        optimizer.grad_scale = scale[index]  # type: ignore[attr-defined]
        optimizer.found_inf = found_inf[index]  # type: ignore[attr-defined]
        optimizer.step()


# cross-entropy: loss, correct predictions and gradient.

_LOSS_BARS: dict[tuple[str, Size], float] = {("cpu", (512, 10)): 2.0}


def cross_entropies(args: BenchArgs, device: torch.device, size: Size) -> Iterator[BenchPair]:
    """Yields the loss with and without its gradient."""
    rows, classes = size
    draw = drawing(device)
    values = draw(rows, classes)
    targets = draw(rows, classes).argmax(dim=1)
    sums = Accumulators(1, samples=rows, device=device)
    for dtype in DTYPES:
        logits = values.to(dtype, copy=True)
        leaf = logits.clone().requires_grad_()
        with_backward = BenchPair(
            case="cross-entropy: with backward",
            size=f"{rows} x {classes:,} {dtype_name(dtype)}",
            device=device,
            baseline="F.cross_entropy + argmax + eq + sum",
            run=partial(_loss_with_backward, leaf, targets, sums),
            run_baseline=partial(_public_loss_with_backward, leaf, targets),
            bar=_LOSS_BARS.get((device.type, size)),
        )
        yield with_backward
        yield replace(
            with_backward,
            case="cross-entropy: no gradient, into blocks",
            run=partial(cross_entropy_into, logits, targets, sums, 0, first=0),
            run_baseline=partial(public_loss, logits, targets),
        )


def public_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns ``(loss [], correct [B], number correct [])`` by public calls; computes in float32, as autocast does."""
    loss = F.cross_entropy(logits.float(), targets)
    correct = logits.argmax(dim=1) == targets
    return loss, correct, correct.sum()


def _public_loss_with_backward(logits: Tensor, targets: Tensor) -> None:
    torch.autograd.grad(public_loss(logits, targets)[0], logits)


def _loss_with_backward(logits: Tensor, targets: Tensor, sums: Accumulators) -> None:
    result = cross_entropy(logits, targets)
    torch.autograd.grad(result.loss, logits)
    accumulate_(sums, 0, result.stats)


# grad-stats: all statistics, against the same ones and against the norm alone.

# Size -> min ratios to all statistics and to the norm alone. The last one is bound by memory bandwidth.
_STATISTICS_BARS: dict[Size, tuple[float | None, float | None]] = {
    (11, 48): (None, 4.0),
    (100, 48): (20.0, 6.0),
    (1000, 48): (20.0, 6.0),
    (20, 100_000): (None, 1.0),
}


def statistics(args: BenchArgs, device: torch.device, size: Size) -> Iterator[BenchPair]:
    """Yields all statistics, against those of public calls on each gradient and on all joined, and the norm alone."""
    count, elements = size
    draw = drawing(device)
    gradients = [draw(elements) for _ in range(count)]
    bar: float | None = None
    norm_bar: float | None = None
    if device.type == "cpu":
        bar, norm_bar = _STATISTICS_BARS.get(size, (None, None))
    counted_each = BenchPair(
        case="grad-stats: all statistics",
        size=f"{count} x {elements:,}",
        device=device,
        baseline="public calls, each",
        run=partial(grad_stats, [gradients]),
        run_baseline=partial(public_statistics, gradients, joined=False),
        bar=bar,
    )
    yield counted_each
    joined = partial(public_statistics, gradients)
    yield replace(counted_each, baseline="public calls, joined", run_baseline=joined, bar=None)
    norm = partial(get_total_norm, gradients)
    yield replace(counted_each, baseline="get_total_norm (norm only)", run_baseline=norm, bar=norm_bar)


def public_statistics(gradients: Sequence[Tensor], joined: bool = True) -> Tensor:
    """Returns the same statistics ``[13]`` of one group by public PyTorch calls, none of which waits for the device.

    ``joined`` counts on one concatenation of all gradients, the fastest known public way for many small ones; otherwise
    each gradient is counted in place. Norms are float64: float32 is faster, but overflows above 1e19.
    """
    norms = torch.stack([torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients])
    sum_sq = norms.square().sum()
    norm = sum_sq.sqrt()
    vanishing = (norms < VANISHING_NORM).sum()
    exploding = ((norms > 10.0) | ~norms.isfinite()).sum()

    parts = gradients
    if joined:
        parts = [torch.cat([gradient.flatten() for gradient in gradients])]
    special = torch.stack([_special_values(part) for part in parts]).sum(dim=0)

    count = norm.new_full((), len(gradients))
    elements = norm.new_full((), sum(gradient.numel() for gradient in gradients))
    health = (1 - (0.5 * vanishing + 0.8 * exploding) / count).clamp(0, 1)
    clip = (1.0 / (norm + 1e-6)).clamp(max=1)  # as torch.nn.utils.clip_grad_norm_ does, to a norm of 1
    health, clip = torch.where(norm.isfinite(), torch.stack([health, clip]), 0.0)
    smallest, largest = norms.aminmax()
    sizes = (sum_sq, norm, count, elements, smallest, largest)
    return torch.stack([*sizes, vanishing, exploding, *special, health, clip])


def _special_values(part: Tensor) -> Tensor:
    """Counts NaN, infinite and zero elements."""
    return torch.stack([part.isnan().sum(), part.isinf().sum(), (part == 0).sum()])


# norm-relu-pool: forward and backward of three blocks, as in a small host, against three PyTorch modules each.

BLOCKS = 3
BATCH = {"cpu": 128, "cuda": 4096}  # on a GPU, the first block is 64 MB of bfloat16
_POOL_BARS = {torch.bfloat16: 4.0, torch.float32: 1.8}


class ThreeModules(nn.BatchNorm2d):
    """The modules that `NormReluPool` replaces."""

    def forward(self, input: Tensor) -> Tensor:
        """``[N, C, H, W]`` to ``[N, C, H // 2, W // 2]``."""
        return F.max_pool2d(F.relu(super().forward(input)), 2)


def pools(args: BenchArgs, device: torch.device, size: Size) -> Iterator[BenchPair]:
    """Yields all blocks together; each has twice the channels of the block before, on half the side."""
    channels, side = size
    batch = BATCH[device.type]
    for dtype, bar in _POOL_BARS.items():
        own = []
        other = []
        for block in range(BLOCKS):
            shape = (batch, channels * 2**block, side // 2**block, side // 2**block)
            own.append(_pool_step(NormReluPool(shape[1], pool=True), shape, dtype, device))
            other.append(_pool_step(ThreeModules(shape[1]), shape, dtype, device))
        yield BenchPair(
            case=f"norm-relu-pool: forward + backward, {dtype_name(dtype)}",
            size=f"{BLOCKS} blocks from {batch} x {channels} x {side} x {side}",
            device=device,
            baseline="three modules",
            run=partial(_run_all, own),
            run_baseline=partial(_run_all, other),
            bar=bar if device.type == "cpu" else None,
        )


def _pool_step(
    module: nn.Module,
    shape: Size,
    dtype: torch.dtype,
    device: torch.device,
) -> Callable[[], None]:
    """Returns a forward and backward pass in training mode, on the same values for every module."""
    module.to(device)
    draw = drawing(device)
    x = draw(*shape).to(dtype, memory_format=torch.channels_last).requires_grad_()
    gradient = torch.randn_like(module(x))

    def step() -> None:
        x.grad = None
        module.zero_grad(set_to_none=True)
        module(x).backward(gradient)

    return step


def _run_all(steps: Sequence[Callable[[], None]]) -> None:
    for step in steps:
        step()


# stage-batch: a training batch of images, against torchvision's transforms with one crop for all, which draws fewer
# random numbers; on a GPU, against a copy of the same bytes.

MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.247, 0.2435, 0.2616)
PADDING = 4
_DATASET = 2000
_STAGE_BARS = {"cpu": 4.0, "cuda": 0.7}
_LARGE = 64_000_000  # bytes from which the bar on a GPU applies; smaller batches measure the launch


def staged_batches(args: BenchArgs, device: torch.device, size: Size) -> Iterator[BenchPair]:
    """Yields both dtypes. Comparisons on the CPU need torchvision."""
    batch, side = size
    images = torch.randint(0, 256, (_DATASET, side, side, 3), dtype=torch.uint8, device=device)
    rows = torch.randint(0, _DATASET, (batch,), device=device)
    table = normalisation_table(MEAN, STD, device=device)
    for dtype in DTYPES:
        out = torch.empty((batch, 3, side, side), dtype=dtype, device=device, memory_format=torch.channels_last)
        moved = out.numel() * (1 + out.element_size())  # bytes read and written
        bar: float | None = _STAGE_BARS[device.type]
        if device.type == "cpu":
            planes = images.permute(0, 3, 1, 2).contiguous()  # torchvision expects [N, C, H, W]
            baseline = "torchvision v2, one crop for all"
            other: Callable[[], object] = partial(_transform, torchvision_pipeline(side), planes, rows, out)
        else:
            source = torch.zeros(moved // 2, dtype=torch.uint8, device=device)
            baseline = "copy of the same bytes"
            other = partial(torch.empty_like(source).copy_, source)
            if moved < _LARGE:
                bar = None
        yield BenchPair(
            case="stage-batch: crop, flip, normalise",
            size=f"{batch} x 3 x {side} x {side} {dtype_name(dtype)}",
            device=device,
            baseline=baseline,
            run=partial(stage_images, images, rows, table, padding=PADDING, flip=True, out=out),
            run_baseline=other,
            bar=bar,
        )


def torchvision_pipeline(side: int) -> Any:
    """Returns random crop, flip, cast and normalisation by torchvision's v2 transforms."""
    v2 = import_torchvision("torchvision.transforms.v2")
    return v2.Compose(
        [
            v2.RandomCrop(side, padding=PADDING),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(MEAN, STD),
        ]
    )


def _transform(pipeline: Any, planes: Tensor, rows: Tensor, out: Tensor) -> None:
    out.copy_(pipeline(planes[rows]))


_STEP_SIZES = ((11, 48), (11, 2304), (20, 100_000))
CASES = {
    "adamw": Case("TENSORSxELEMENTS", _STEP_SIZES, adamw),
    "sgd": Case("TENSORSxELEMENTS", _STEP_SIZES, sgd),
    "cross-entropy": Case("SAMPLESxCLASSES", ((512, 10), (128, 10), (512, 100), (64, 50_257)), cross_entropies),
    "grad-stats": Case("TENSORSxELEMENTS", tuple(_STATISTICS_BARS), statistics),
    "norm-relu-pool": Case("CHANNELSxSIDE", ((8, 32),), pools),
    "stage-batch": Case(
        "IMAGESxSIDE",
        ((128, 32), (512, 32)),
        staged_batches,
        cuda=((512, 32), (16_384, 32)),
    ),
}
