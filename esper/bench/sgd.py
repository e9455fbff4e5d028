"""Cases of `sgd`: the step of a host and its seeds in one call, against one `torch.optim.SGD(fused=True)` step each."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from esper.bench.request import BenchArgs, SizeForm
from esper.bench.runner import BenchCase
from esper.ops import SGD, grad_stats, sgd_step

NAME = "sgd"

SIZE = SizeForm(("tensors", "elements"), "11x48")  # per optimizer
DEFAULT_SIZES = ((11, 48), (11, 2304), (20, 100_000))
OPTIMIZERS = 4  # a host and three seeds
MAX_NORM = 1.0
LR, MOMENTUM, DECAY = 1e-4, 0.9, 5e-4


def _parameters(count: int, elements: int, device: torch.device) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = [nn.Parameter(torch.randn(elements, generator=generator).to(device)) for _ in range(count)]
    for parameter in made:
        parameter.grad = torch.randn(elements, generator=generator).to(device)
    return made


def comparisons(request: BenchArgs) -> Iterator[BenchCase]:
    """Yields all comparisons. Both sides use the clip coefficients of the same `grad_stats`."""
    for device in request.devices:
        yield from _on(device, request)


def _on(device: torch.device, request: BenchArgs) -> Iterator[BenchCase]:
    for count, elements in request.sizes or DEFAULT_SIZES:
        own = [SGD(_parameters(count, elements, device), LR, MOMENTUM, DECAY) for _ in range(OPTIMIZERS)]
        other = [
            torch.optim.SGD(_parameters(count, elements, device), LR, MOMENTUM, weight_decay=DECAY, fused=True)
            for _ in own
        ]
        groups = [[p.grad for p in optimizer.param_groups[0]["params"]] for optimizer in own]
        coefficient = grad_stats(groups, MAX_NORM).clip_coef

        def ours(own: list[SGD] = own, coefficient: Tensor = coefficient) -> None:
            sgd_step(own, coefficient)

        def each(other: list[torch.optim.SGD] = other, coefficient: Tensor = coefficient) -> None:
            usable = coefficient > 0
            scale = torch.where(usable, 1 / coefficient, 1.0).float()
            found_inf = (~usable).float()
            for index, optimizer in enumerate(other):
                optimizer.grad_scale = scale[index]  # type: ignore[attr-defined]
                optimizer.found_inf = found_inf[index]  # type: ignore[attr-defined]
                optimizer.step()

        size = f"{OPTIMIZERS} x {count} x {elements:,}"
        baseline = "torch.optim.SGD, fused, each"
        yield BenchCase(f"{NAME}: clipped step", size, device, baseline, ours, each, None)
