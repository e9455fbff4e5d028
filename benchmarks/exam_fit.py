"""Fits an advisor to logged contexts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from esper.agents.advisor import LEAST, UNIT, Advisor, HostFacts
from esper.core.arrays import Floats

STEPS = 1_500
BATCH = 256


def fit(
    facts: Sequence[HostFacts],
    gains: Sequence[Floats],
    seed: int = 0,
) -> Advisor:
    """Fits an advisor to the facts of logged contexts, and what each multiple gained over 1, pp [multiples] by context.

    Each member learns from four fifths of the contexts and keeps the weights of its least error on the others.
    """
    rows = [of_one.plans() for of_one in facts]
    context = torch.from_numpy(
        np.repeat(np.arange(len(rows)), [len(of_one) for of_one in rows])
    )
    x = torch.from_numpy(
        np.concatenate([of_one for of_one in rows if len(of_one)])
    ).float()
    y = torch.from_numpy(
        np.concatenate([of_one[1:] for of_one in gains]) / UNIT
    ).float()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        advisor = Advisor(x.shape[-1])
        advisor.mean.copy_(x.mean(dim=0))
        advisor.deviation.copy_(x.std(dim=0).clamp(min=LEAST))
        scaled = advisor.scaled(x)
        for member in advisor.members:
            order = torch.randperm(len(rows))
            held_out = (order < max(1, len(rows) // 5))[context]
            _fit_member(member, scaled, y, ~held_out, held_out)
    return advisor.eval()


def _fit_member(
    member: nn.Module,
    x: Tensor,
    y: Tensor,
    learn: Tensor,
    judge: Tensor,
) -> None:
    optimizer = torch.optim.AdamW(member.parameters(), 3e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    least = math.inf
    best: dict[str, Tensor] = {}
    learned = learn.nonzero().flatten()
    for step in range(STEPS):
        if step % 20 == 0:
            with torch.no_grad():
                error = float(
                    nn.functional.huber_loss(member(x[judge])[:, 0], y[judge])
                )
            if error < least:
                least = error
                best = {
                    name: value.clone() for name, value in member.state_dict().items()
                }
        rows = learned[torch.randint(len(learned), (BATCH,))]
        loss = nn.functional.huber_loss(member(x[rows])[:, 0], y[rows])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    member.load_state_dict(best)
