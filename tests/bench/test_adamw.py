"""Both sides of the case `adamw`."""

from __future__ import annotations

import torch

from esper.bench import adamw
from esper.bench.case import BenchArgs


def test_both_sides_make_the_same_clipped_steps() -> None:
    (comparison,) = adamw.comparisons(BenchArgs(sizes=((3, 8),)))
    sides = [run.args[0] for run in (comparison.run, comparison.run_baseline)]  # type: ignore[attr-defined]
    own, other = (
        [
            p
            for optimizer in side
            for group in optimizer.param_groups
            for p in group["params"]
        ]
        for side in sides
    )
    before = [parameter.clone() for parameter in own]
    comparison.run()
    comparison.run_baseline()  # once: torch's step leaves its gradients scaled
    assert len(before) == 12
    torch.testing.assert_close(own, other)
    assert not any(
        torch.equal(then, now) for then, now in zip(before, own, strict=True)
    )
