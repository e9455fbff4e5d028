"""Results of `evaluate`: their forms, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from esper.grower.scores import warning_of_unit
from tests.grower.loops import Loop, scores


@pytest.mark.parametrize(
    ("result", "error", "words"),
    [
        (math.nan, ValueError, "epoch 1: evaluate returned a score that is not finite"),
        (torch.tensor([1.0, math.inf]), ValueError, "not finite"),
        (torch.ones(3, 3), TypeError, r"shape \[3, 3\]"),
        (torch.ones(1), TypeError, "n >= 2"),
        ((1.0, 2.0, 3.0), TypeError, "tuple of 3"),
        ("good", TypeError, "returned str"),
        (None, TypeError, "returned NoneType"),
    ],
)
def test_an_invalid_score_is_refused_with_the_valid_forms(
    result: object, error: type[Exception], words: str
) -> None:
    loop = Loop()
    loop.train()
    assert loop.grower is not None
    with pytest.raises(error, match=words):
        loop.grower.step(lambda _model: result)


def test_after_a_bad_score_the_step_can_be_repeated() -> None:
    """Nothing has advanced: the loop continues as if the first score had been right."""
    loop, right = Loop(), Loop().run()
    for epoch in range(loop.epochs):
        loop.train()
        assert loop.grower is not None
        if epoch in (0, 3, 7):
            with pytest.raises(ValueError, match=f"epoch {epoch + 1}: "):
                loop.grower.step(lambda _model: math.nan)
        loop.steps.append(loop.grower.step(scores))
    assert loop.steps == right.steps


@pytest.mark.parametrize(
    "result",
    [
        0.5,
        np.float32(0.5),
        torch.tensor(0.5),
        (0.5, 1.0),
        ([0.0, 1.0], torch.tensor(1.0)),
    ],
)
def test_scores_come_in_many_forms(result: object) -> None:
    loop = Loop()
    loop.train()
    assert loop.grower is not None
    assert loop.grower.step(lambda _model: result).score == 0.5


@pytest.mark.parametrize(
    ("score", "points", "fitting"),
    [
        (93.5, 100.0, "points=1"),
        (-3.73967, 100.0, "points=10"),
        (0.005, 1e5, "points=10000"),
    ],
)
def test_a_score_in_another_unit_is_said_once_and_ends_nothing(
    score: float, points: float, fitting: str
) -> None:
    loop = Loop(epochs=4, points=points)
    grower = loop.grower
    assert grower is not None

    def run() -> None:
        for _ in range(3):
            loop.train()
            assert grower.step(lambda _model: score).score == pytest.approx(score)

    with pytest.warns(UserWarning, match=f"pass {fitting};") as said:
        run()
    assert len(said) == 1


def test_scores_of_the_expected_size_are_taken_without_a_word() -> None:
    for score in (0.0, 1.0, -1.5, math.nan, math.inf):
        assert warning_of_unit(score, 100.0) is None
