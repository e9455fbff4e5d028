"""An advisor: predicts from what is known before the first step what wider layers would bring, and at what price."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from esper.core.arrays import Floats
from esper.ops.torch_state import kept_generators, training_state

ENTRIES = 17
"""Number of entries of a plan, see :meth:`HostFacts.plans`."""
HIDDEN = 64
MEMBERS = 8
UNIT = 10.0
"""Gains are learned in units of 10 pp."""
LIMIT = 3.0
"""Entries are clamped to this many standard deviations of those that the advisor learned from."""
LEAST = 1e-3
"""Standard deviation of entries that never differed, from which nothing can be learned."""
FACTS = {
    "layers": 1,
    "parameters": 2,
    "operations": 3,
    "inputs": 4,
    "classes": 5,
    "samples": 7,
    "epochs": 10,
    "steps": 11,
}
"""Numbers that an advisor names if they are far from those that it learned from, by their place in a plan."""
WEIGHTS = Path(__file__).with_name("advisor.safetensors")


@dataclass(frozen=True)
class HostFacts:
    """HostFacts known of a network and its training before the first step."""

    widths: tuple[float, ...]
    """Units of the layers that can be widened."""
    parameters: Mapping[int, float]
    """Number of parameters at each multiple of the widths that is on offer; 1 comes first."""
    operations: float
    """Floating-point operations of a forward pass of a sample."""
    inputs: int
    """Numbers in a sample."""
    classes: int
    convolutional: bool
    samples: int
    """Training samples."""
    epochs: int
    updates: float
    """Steps of the optimizer."""
    rate: float
    """The optimizer's first learning rate."""

    def plans(self) -> Floats:
        """Returns the entries of each multiple but 1, in fixed scales, float64 [multiples - 1, entries]."""
        width = float(np.mean(np.log2(self.widths)))
        first = self.parameters[1]
        known = [
            width,
            len(self.widths),
            math.log2(first),
            math.log2(self.operations),
            math.log2(self.inputs),
            math.log2(self.classes),
            float(self.convolutional),
            math.log2(self.samples),
            math.log2(self.samples / self.classes),
            math.log2(self.samples / first),
            math.log2(self.epochs),
            math.log2(self.updates),
            math.log2(self.rate),
        ]
        rows = []
        for factor, parameters in self.parameters.items():
            if factor == 1:
                continue
            doublings = math.log2(factor)
            planned = [
                doublings,
                width + doublings,
                math.log2(parameters / first),
                math.log2(self.samples / parameters),
            ]
            rows.append([*known, *planned])
        return np.array(rows).reshape(len(rows), ENTRIES)

    def costs(self, price: float) -> Floats:
        """Returns the cost of each multiple at ``price`` pp a doubling of the parameters, [multiples]."""
        counts = np.array(list(self.parameters.values()))
        return np.asarray(price * np.log2(counts / counts[0]))


class Advisor(nn.Module):
    """An ensemble of small networks that predict the gain in the final score of each plan.

    Args:
        entries: number of entries of a plan, see :meth:`HostFacts.plans`.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, entries: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(entries))
        self.register_buffer("deviation", torch.ones(entries))
        self.members = nn.ModuleList()
        for _ in range(MEMBERS):
            member = nn.Sequential(
                nn.Linear(entries, HIDDEN),
                nn.GELU(),
                nn.Linear(HIDDEN, HIDDEN),
                nn.GELU(),
                nn.Linear(HIDDEN, 1),
            )
            self.members.append(member)

    def scaled(self, plans: Tensor) -> Tensor:
        """Returns plans [..., entries] in standard deviations of those that it learned from; 0 where these were all the
        same."""
        scaled = ((plans - self.mean) / self.deviation).clamp(-LIMIT, LIMIT)
        return torch.where(self.deviation > LEAST, scaled, 0.0)

    def forward(self, plans: Tensor) -> Tensor:
        """Returns the gain of plans [..., entries] by each member, pp [members, ...]."""
        entries = self.scaled(plans)
        gains = [member(entries)[..., 0] for member in self.members]
        return torch.stack(gains) * UNIT

    def words(self, facts: HostFacts, price: float) -> str:
        """Returns a sentence about the multiple that it chooses, or about the best one if that is 1."""
        multiples = list(facts.parameters)
        if len(multiples) == 1:
            return "the advisor has no multiple of the widths on offer"
        means = self.gains(facts).mean(axis=0)
        costs = facts.costs(price)
        chosen = self.choose(facts, price)
        best = multiples.index(chosen)
        if chosen == 1:
            best = 1 + int((means - costs)[1:].argmax())
        layers, grow = "1 layer", "it grows"
        if len(facts.widths) > 1:
            layers, grow = f"{len(facts.widths)} layers", "they grow"
        gain = f"{means[best]:+.1f} pp of {layers} {multiples[best]} times as wide"
        found = f"{gain}, for {costs[best]:.1f} pp of parameters"
        decision = "nothing grows" if chosen == 1 else grow
        words = f"the advisor expects {found}: {decision}"
        unlike = self.unlike(facts)
        if unlike:
            words += f"; {unlike_words(unlike)}"
        return words

    @training_state()
    def unlike(self, facts: HostFacts) -> list[str]:
        """Returns the names of what is far from all that it learned from."""
        plan = torch.from_numpy(facts.plans()[0]).float()
        far = (plan - self.mean).abs() > LIMIT * self.deviation
        return [name for name, entry in FACTS.items() if far[entry]]

    @training_state()
    @torch.no_grad()
    def gains(self, facts: HostFacts) -> Floats:
        """Returns the predicted gain of each multiple, pp [members, multiples]; that of 1 is 0."""
        plans = torch.from_numpy(facts.plans()).float()
        predicted = self(plans).double().numpy()
        return np.pad(predicted, ((0, 0), (1, 0)))

    def choose(
        self,
        facts: HostFacts,
        price: float,
    ) -> int:
        """Returns the multiple whose mean gain exceeds its cost by most."""
        if len(facts.parameters) == 1:
            return 1
        returns = self.gains(facts).mean(axis=0) - facts.costs(price)
        return list(facts.parameters)[int(returns.argmax())]


def unlike_words(unlike: Sequence[str]) -> str:
    """Returns a warning that names what is far from all that an advisor learned from."""
    *others, last = unlike
    names = f"{', '.join(others)} and {last}" if others else last
    return f"it has learned from no training with such numbers of {names}: the gain may be far off"


@cache
@training_state()
def shipped() -> Advisor:
    """Loads the advisor that comes with Esper."""
    from safetensors.torch import load_file

    weights = load_file(WEIGHTS)
    with kept_generators():  # from which the caller's training may draw
        advisor = Advisor(len(weights["mean"]))
    advisor.load_state_dict(weights)
    return advisor.eval()
