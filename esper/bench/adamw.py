"""Cases of `adamw`: the step of a host and its seeds in one call, against one of `torch.optim.AdamW` each."""

from collections.abc import Iterator
from functools import partial

import torch

from esper.bench.case import BenchArgs, BenchCase
from esper.bench.sgd import LR, MAX_NORM, OPTIMIZERS, SIZES, gradients_of, parameters, torch_steps
from esper.ops.adamw import AdamW
from esper.ops.grad_stats import grad_stats
from esper.ops.optimizer import step_all

NAME = "adamw"


def comparisons(args: BenchArgs) -> Iterator[BenchCase]:
    """Yields the clipped step. Both sides use the clip coefficients of the same `grad_stats`."""
    for device, (count, elements) in SIZES.of(args):
        rate = torch.tensor(LR, device=device)
        own = [AdamW(parameters(count, elements, device), rate) for _ in range(OPTIMIZERS)]
        other = [  # Esper's does not decay vectors
            torch.optim.AdamW(parameters(count, elements, device), LR, weight_decay=0.0, fused=True) for _ in own
        ]
        gradients = [gradients_of(optimizer) for optimizer in own]
        coefficient = grad_stats(gradients, MAX_NORM).clip_coef
        yield BenchCase(
            case=f"{NAME}: clipped step",
            size=f"{OPTIMIZERS} x {count} x {elements:,}",
            device=device,
            baseline="torch.optim.AdamW, fused, each",
            run=partial(step_all, own, coefficient),
            run_baseline=partial(torch_steps, other, coefficient),
        )
