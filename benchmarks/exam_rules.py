"""Rules that choose a plan for each context, and the ceiling above them all.

Returns are float64 [contexts, plans, seeds] in pp: test accuracy minus the price of the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.exam_play import factor_of
from esper.core.arrays import Floats, Ints
from esper.core.sizing import FACTORS
from esper.exam.context import Context

KEYS: dict[str, Callable[[Context], float]] = {
    "price": lambda context: context.price,
    "width": lambda context: context.width,
    "samples": lambda context: context.samples,
}
"""Entries by which a table of best plans is divided."""
BINS = 4
FEWEST = 3
"""Fewest contexts in a cell of a table; with fewer, its plan is the best single one."""


def cost_of(context: Context, factor: int) -> float:
    """Returns the price of growing by ``factor``, pp."""
    doublings = np.log2(context.parameters(factor) / context.parameters())
    return context.price * float(doublings)


def costs(contexts: Sequence[Context]) -> Floats:
    """Returns the price of each plan, pp [contexts, plans]."""
    rows = np.zeros((len(contexts), len(FACTORS)))
    for row, context in enumerate(contexts):
        for plan in range(len(FACTORS)):
            rows[row, plan] = cost_of(context, factor_of(context, plan))
    return rows


def returns_of(
    contexts: Sequence[Context],
    accuracies: Floats,
) -> Floats:
    """Returns the return of every plan; ``accuracies`` are pp [contexts, plans, seeds]."""
    return accuracies - costs(contexts)[:, :, None]


def ceiling(returns: Floats) -> Floats:
    """Returns the return of each context's best plan, [contexts], chosen on all seeds but one and judged on that."""
    seeds = returns.shape[2]
    rows = np.arange(len(returns))
    judged = []
    for seed in range(seeds):
        others = np.delete(returns, seed, axis=2).mean(axis=2)
        judged.append(returns[rows, others.argmax(axis=1), seed])
    return np.asarray(np.mean(judged, axis=0))


@dataclass
class PlanTable:
    """The plan that was best, on average, in each cell of a table; without keys the best single plan."""

    keys: tuple[str, ...] = ()
    edges: list[Floats] = field(default_factory=list)
    plans: dict[int, int] = field(default_factory=dict)
    single: int = 0

    @classmethod
    def fit(
        cls,
        keys: tuple[str, ...],
        contexts: Sequence[Context],
        returns: Floats,
    ) -> PlanTable:
        means = returns.mean(axis=2)
        table = cls(keys, single=int(means.mean(axis=0).argmax()))
        for key in keys:
            values = [KEYS[key](context) for context in contexts]
            table.edges.append(np.quantile(values, np.arange(1, BINS) / BINS))
        cells = table._cells(contexts)
        for cell in np.unique(cells):
            inside = means[cells == cell]
            if len(inside) >= FEWEST:
                table.plans[int(cell)] = int(inside.mean(axis=0).argmax())
        return table

    def choose(self, contexts: Sequence[Context]) -> Ints:
        """Returns the plan of each context, [contexts]."""
        return np.array(
            [self.plans.get(int(cell), self.single) for cell in self._cells(contexts)]
        )

    def _cells(self, contexts: Sequence[Context]) -> Ints:
        cells = np.zeros(len(contexts), dtype=np.int64)
        for key, edges in zip(self.keys, self.edges, strict=True):
            values = [KEYS[key](context) for context in contexts]
            cells = cells * BINS + np.digitize(values, edges)
        return cells


def halving(
    contexts: Sequence[Context],
    tried: Floats,
) -> Ints:
    """Returns the plan that is best on validation after short trainings, ``tried`` pp [contexts, plans]."""
    return np.asarray((tried - costs(contexts)).argmax(axis=1))
