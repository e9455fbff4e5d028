from __future__ import annotations

from dataclasses import replace

import numpy as np

from benchmarks.exam_play import (
    Job,
    factor_of,
    facts_of,
    law_of_region,
    play,
    train_jobs,
)
from esper.exam.context import REGION, Context
from tests.exam.test_context import IMAGES

CONTEXTS = [
    Context("digits", width=2, samples=64, epochs=2, price=1.0, key=1),
    Context(
        "made_table_3",
        width=40,
        samples=40,
        epochs=3,
        price=1.0,
        optimizer="sgd",
        key=2,
    ),
]


def test_plans_of_one_width_share_its_host_and_seeds_differ() -> None:
    scores = play(CONTEXTS, seeds=[0, 1])
    assert scores.shape == (2, 5, 2, 2)
    assert ((scores >= 0) & (scores <= 100)).all()
    np.testing.assert_array_equal(
        scores[1, 1], scores[1, 4]
    )  # the table's host is too wide for more than ×2
    assert (scores[:, :, 0] != scores[:, :, 1]).any()


def test_a_host_is_the_same_in_any_company() -> None:
    jobs = [Job(context, 2, 0, context.epochs) for context in CONTEXTS]
    together = train_jobs(jobs)
    alone = [train_jobs([job])[0] for job in jobs]
    np.testing.assert_array_equal(together, alone)


def test_facts_have_the_parameters_of_every_width() -> None:
    facts = facts_of(IMAGES)
    assert facts.parameters == {1: 277, **{f: IMAGES.parameters(f) for f in (2, 4, 8)}}
    assert facts.updates == 60 // 32 * 4
    assert facts.convolutional
    assert facts.inputs == 64


def test_a_plan_that_would_be_too_wide_is_the_widest_that_is_not() -> None:
    wide = replace(IMAGES, width=12)
    assert wide.factors == (1, 2)
    assert [factor_of(wide, plan) for plan in range(5)] == [1, 2, 2, 2, 2]


def test_the_law_of_the_region_stays_in() -> None:
    rng = np.random.default_rng(0)
    inside = law_of_region(["digits"])
    for context in (inside.draw(rng) for _ in range(50)):
        assert context.width in REGION.widths
        assert REGION.samples[0] <= context.samples <= REGION.samples[1]
        assert REGION.epochs[0] <= context.epochs <= REGION.epochs[1]
