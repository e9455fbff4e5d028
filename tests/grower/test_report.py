"""Reports of the steps of a Grower."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from esper.lifecycle.stage import SeedStage
from esper.spaces.action import Op
from tests.grower.loops import LENIENT, Loop, do, plant, script, stages


def test_stages_are_the_lifecycles() -> None:
    """Names in reports are those of the lifecycle."""
    loop = Loop().run()
    assert set(stages(loop)) <= {stage.name for stage in SeedStage}


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
    assert told[-1].endswith("; no seed is on trial, 1 kept")


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
    assert loop.grower is not None
    assert other.grower is not None
    other.grower.load_state_dict(loop.grower.state_dict())
    assert other.grower.env is not None
    assert other.grower.env.removed == {"r0c0": loop.steps[-1].slots["r0c0"].removed}


def test_a_refused_action_says_why() -> None:
    actions = {0: plant("r0c0"), 1: do(Op.ADVANCE, "r0c0"), 2: do(Op.ADVANCE, "r0c0")}
    told = lines(Loop(controller=script(actions)).run(4))
    assert "; ADVANCE in r0c0 is refused: " in told[2]


@pytest.mark.parametrize(
    ("actions", "words"),
    [
        (
            {},
            "none was planted: a seed that is tried needs 7 decisions to be kept, and the horizon has 5",
        ),
        ({0: plant("r0c0")}, "in r0c0 was still in GERMINATED at the end"),
        (
            {0: plant("r0c0"), 1: do(Op.ADVANCE, "r0c0"), 4: do(Op.PRUNE, "r0c0")},
            "no seed is kept: r0c0 held ",
        ),
    ],
)
def test_the_end_says_why_nothing_was_kept(
    actions: Any, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(controller=script(actions), epochs=6).run()
    assert loop.grower is not None
    with caplog.at_level(logging.WARNING):
        loop.grower.finish()
    assert words in caplog.text


def test_the_end_says_nothing_of_the_kind_if_something_was_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop = Loop().run()
    assert loop.grower is not None
    with caplog.at_level(logging.WARNING):
        loop.grower.finish()
    assert "no seed is kept" not in caplog.text


def test_a_seed_that_is_kept_at_once_is_said_to_be() -> None:
    config = LENIENT.with_values(env={"at_once": True})
    loop = Loop(
        sites={"r2c0": "body.0 -> body.2"},
        controller=script({0: plant("r2c0", "widen_half")}),
        config=config,
    )
    assert str(loop.run(1).steps[0]).endswith(" parameters, kept at once")
