from __future__ import annotations

import numpy as np

from esper.exam.context import Context
from esper.exam.play import Job, play, train_jobs

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
