"""Cases of `sgd`: the step of a host and its seeds in one call, against one `torch.optim.SGD(fused=True)` step each."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from esper.bench.case import BenchArgs, BenchCase, Sizes
from esper.ops.grad_stats import grad_stats
from esper.ops.optimizer import step_all
from esper.ops.sgd import SGD

NAME = "sgd"
SIZES = Sizes("TENSORSxELEMENTS", ((11, 48), (11, 2304), (20, 100_000)), seconds=1.0)  # per optimizer

OPTIMIZERS = 4  # a host and three seeds
MAX_NORM = 1.0
LR = 1e-4
MOMENTUM = 0.9
DECAY = 5e-4


def parameters(count: int, elements: int, device: torch.device) -> list[nn.Parameter]:
    """Returns vectors of random numbers with random gradients, the same at each call."""
    generator = torch.Generator().manual_seed(0)
    # All values are drawn before the first gradient.
    vectors = [nn.Parameter(torch.randn(elements, generator=generator).to(device)) for _ in range(count)]
    for vector in vectors:
        vector.grad = torch.randn(elements, generator=generator).to(device)
    return vectors


def gradients_of(optimizer: torch.optim.Optimizer) -> list[Tensor | None]:
    """Returns the gradients of an optimizer's parameters."""
    return [p.grad for group in optimizer.param_groups for p in group["params"]]


def torch_steps(optimizers: Sequence[torch.optim.Optimizer], coefficient: Tensor) -> None:
    """Steps each fused optimizer with its gradients multiplied by ``coefficient`` [G]; skips those with 0 or NaN."""
    usable = coefficient > 0
    scale = torch.where(usable, 1 / coefficient, 1.0).float()
    found_inf = (~usable).float()
    for index, optimizer in enumerate(optimizers):
        # The same attributes by which torch.amp.GradScaler scales and skips the steps of fused optimizers.
        optimizer.grad_scale = scale[index]  # type: ignore[attr-defined]
        optimizer.found_inf = found_inf[index]  # type: ignore[attr-defined]
        optimizer.step()


def comparisons(args: BenchArgs) -> Iterator[BenchCase]:
    """Yields the clipped step. Both sides use the clip coefficients of the same `grad_stats`."""
    for device, (count, elements) in SIZES.of(args):
        own = [SGD(parameters(count, elements, device), LR, MOMENTUM, DECAY) for _ in range(OPTIMIZERS)]
        other = [
            torch.optim.SGD(parameters(count, elements, device), LR, MOMENTUM, weight_decay=DECAY, fused=True)
            for _ in own
        ]
        gradients = [gradients_of(optimizer) for optimizer in own]
        coefficient = grad_stats(gradients, MAX_NORM).clip_coef
        yield BenchCase(
            case=f"{NAME}: clipped step",
            size=f"{OPTIMIZERS} x {count} x {elements:,}",
            device=device,
            baseline="torch.optim.SGD, fused, each",
            run=partial(step_all, own, coefficient),
            run_baseline=partial(torch_steps, other, coefficient),
        )
