"""Cases of `sgd`: the step of a host and its seeds in one call, against one `torch.optim.SGD(fused=True)` step each."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from esper.bench.case import BenchArgs, BenchCase, Sizes
from esper.ops import SGD, grad_stats, sgd_step

NAME = "sgd"
SIZES = Sizes("TENSORSxELEMENTS", ((11, 48), (11, 2304), (20, 100_000)), seconds=1.0)  # per optimizer

OPTIMIZERS = 4  # a host and three seeds
MAX_NORM = 1.0
LR, MOMENTUM, DECAY = 1e-4, 0.9, 5e-4


def parameters(count: int, elements: int, device: torch.device) -> list[nn.Parameter]:
    """Returns vectors of random numbers with random gradients, the same at each call."""
    generator = torch.Generator().manual_seed(0)
    made = [nn.Parameter(torch.randn(elements, generator=generator).to(device)) for _ in range(count)]
    for parameter in made:
        parameter.grad = torch.randn(elements, generator=generator).to(device)
    return made


def torch_steps(optimizers: Sequence[torch.optim.Optimizer], coefficient: Tensor) -> None:
    """Steps each fused optimizer with its gradients multiplied by ``coefficient`` [G]; skips those with 0 or NaN."""
    usable = coefficient > 0
    scale = torch.where(usable, 1 / coefficient, 1.0).float()
    found_inf = (~usable).float()
    for index, optimizer in enumerate(optimizers):
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
        groups = [[p.grad for p in optimizer.param_groups[0]["params"]] for optimizer in own]
        coefficient = grad_stats(groups, MAX_NORM).clip_coef
        yield BenchCase(
            f"{NAME}: clipped step",
            f"{OPTIMIZERS} x {count} x {elements:,}",
            device,
            "torch.optim.SGD, fused, each",
            partial(sgd_step, own, coefficient),
            partial(torch_steps, other, coefficient),
        )
