"""Both sides of the case `sgd`."""

from __future__ import annotations

import torch

from esper.bench import sgd
from esper.bench.case import BenchArgs


def test_both_sides_make_the_same_clipped_steps() -> None:
    (comparison,) = sgd.comparisons(BenchArgs(sizes=((3, 8),)))
    sides = [run.args[0] for run in (comparison.run, comparison.run_baseline)]  # type: ignore[attr-defined]
    before = [
        parameter.clone()
        for optimizer in sides[0]
        for parameter in optimizer.param_groups[0]["params"]
    ]
    comparison.run()
    comparison.run_baseline()  # once: torch's step leaves its gradients scaled
    own, other = (
        [
            parameter
            for optimizer in side
            for parameter in optimizer.param_groups[0]["params"]
        ]
        for side in sides
    )
    torch.testing.assert_close(own, other)
    assert not any(
        torch.equal(then, now) for then, now in zip(before, own, strict=True)
    )
