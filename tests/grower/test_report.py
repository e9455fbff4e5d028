"""Results of `evaluate`, and reports of the steps of a Grower."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from esper.core.action import Op
from tests.grower.loops import Loop, do, plant, scores, script


@pytest.mark.parametrize(
    ("result", "error", "words"),
    [
        (math.nan, ValueError, "epoch 1: evaluate returned a score that is not finite"),
        (torch.tensor([1.0, math.inf]), ValueError, "not finite"),
        (torch.ones(3, 3), TypeError, r"shape \[3, 3\]"),
        (torch.ones(1), TypeError, "n >= 2"),
        ((1.0, 2.0, 3.0), TypeError, "tuple of 3"),
        ("good", TypeError, "returned str"),
        ("0.5", TypeError, "returned str"),
        ([0.5, 1.0], TypeError, r"list of two; return a tuple"),
        (None, TypeError, "returned NoneType"),
    ],
)
def test_an_invalid_score_is_refused_with_the_valid_forms(
    result: object, error: type[Exception], words: str
) -> None:
    loop = Loop()
    loop.train()
    with pytest.raises(error, match=words):
        loop.grower.step(lambda _model: result)


def test_after_a_bad_score_the_step_can_be_repeated() -> None:
    """Nothing has advanced: the loop continues as if the first score had been right."""
    loop, right = Loop(), Loop().run()
    for epoch in range(loop.epochs):
        loop.train()
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


def lines(loop: Loop) -> list[str]:
    return [str(step) for step in loop.steps]


def test_a_step_tells_in_one_line_what_was_planted_blended_and_kept() -> None:
    told = lines(Loop().run())
    assert all(
        "\n" not in line and line.startswith(f"epoch {n}: score 0.")
        for n, line in enumerate(told, 1)
    )
    slot = Loop().run(1).steps[0].slots["r0c0"]
    assert told[0].endswith(
        f"; planted {slot.blueprint} in r0c0 ({slot.path}), {slot.parameters:,} parameters"
    )
    assert slot.parameters > 0
    assert f"{slot.blueprint} in r0c0 is in TRAINING" in told[1]
    assert any(f"; blends in {slot.blueprint} in r0c0" in line for line in told)
    kept = next(line for line in told if "; kept " in line)
    assert f"kept {slot.blueprint} in r0c0, " in kept
    assert "contribution " in kept
    assert told[-1].endswith("; nothing on trial, 1 seed kept")


def test_a_slot_still_shows_what_was_removed_from_it_and_what_decided() -> None:
    loop = Loop(
        controller=script(
            {0: plant("r0c0"), 1: do(Op.ADVANCE, "r0c0"), 4: do(Op.PRUNE, "r0c0")}
        )
    ).run()
    gone = next(step for step in loop.steps if step.slots["r0c0"].removed)
    blueprint = loop.steps[0].slots["r0c0"].blueprint
    assert gone.slots["r0c0"].removed.startswith(
        f"{blueprint}, pruned by the controller, trial "
    )
    assert f"; removed from r0c0: {blueprint}, pruned by the controller, trial " in str(
        gone
    )
    assert loop.steps[-1].slots["r0c0"].removed == gone.slots["r0c0"].removed
    assert loop.steps[0].slots["r0c0"].removed == ""


def test_what_was_removed_is_known_after_a_resume() -> None:
    controller = script(
        {0: plant("r0c0"), 1: do(Op.ADVANCE, "r0c0"), 4: do(Op.PRUNE, "r0c0")}
    )
    loop, other = Loop(controller=controller).run(6), Loop(controller=controller)
    other.grower.load_state_dict(loop.grower.state_dict())
    other.epoch = 6
    other.run(1)
    assert (
        other.steps[-1].slots["r0c0"].removed
        == loop.steps[-1].slots["r0c0"].removed
        != ""
    )


def test_a_refused_action_says_why() -> None:
    actions = {0: plant("r0c0"), 1: do(Op.ADVANCE, "r0c0"), 2: do(Op.ADVANCE, "r0c0")}
    told = lines(Loop(controller=script(actions)).run(4))
    assert "; ADVANCE in r0c0 is refused: " in told[2]
