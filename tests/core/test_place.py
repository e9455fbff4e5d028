"""A forward pass at a site."""

from __future__ import annotations

import torch

from esper.core.place import Features

H, SOURCE, KEPT = torch.ones(2, 3), torch.zeros(2, 5), torch.full((2, 4), 7.0)


def test_other_features_at_the_sink_leave_the_source_unless_it_is_the_sink() -> None:
    there = Features(H, SOURCE, {1: KEPT}).with_sink(H + 1)
    assert torch.equal(there.h, H + 1)
    assert there.source is SOURCE
    assert there.earlier == {1: KEPT}
    here = Features.at_sink(H).with_sink(H + 1)
    assert here.source is here.h


def test_a_change_of_each_tensor_keeps_what_is_one_tensor_as_one() -> None:
    there = Features(H, SOURCE, {1: KEPT}).each(lambda x: x + 1)
    assert [float(x.mean()) for x in (there.h, there.source, there.earlier[1])] == [
        2,
        1,
        8,
    ]
    here = Features.at_sink(H).each(torch.clone)
    assert here.h is not H
    assert here.source is here.h


def test_a_later_change_of_the_pass_does_not_reach_one_that_was_kept() -> None:
    earlier = {1: KEPT}
    kept = Features(H, SOURCE, earlier).with_sink(H)
    earlier[2] = H
    assert list(kept.earlier) == [1]
