"""The env of a loop: its first observation, early starts, and the baseline."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from esper.agents.heuristic import HeuristicController
from esper.agents.make import OwnController
from esper.grower.env import LoopEnv
from esper.grower.grower import Grower
from tests.grower.loops import Loop, same, stages, weights


def test_a_loop_that_starts_early_plants_before_its_first_epoch() -> None:
    loop, usual = Loop(early=True).run(), Loop().run()
    assert [step.epoch for step in loop.steps] == list(range(15))
    assert [step.epoch for step in usual.steps] == list(range(1, 15))
    assert stages(loop) == [*stages(usual), stages(usual)[-1]]  # each an epoch earlier
    assert [step.done for step in loop.steps] == [False] * 14 + [True]


def test_a_loop_that_starts_early_trains_the_same_bits_until_a_seed_is_blended_in() -> (
    None
):
    early, alone = Loop(early=True).run(5), Loop(controller=None).run(5)
    assert stages(early)[-1] == "BLENDING"
    early, alone = Loop(early=True).run(4), Loop(controller=None).run(4)
    assert same(weights(early.model), weights(alone.model))


def test_the_baseline_of_a_loop_that_starts_early_begins_with_its_own_first_score() -> (
    None
):
    baseline = [0.5 + 0.01 * epoch for epoch in range(14)]
    early, usual = (
        Loop(early=True, baseline=baseline).run(),
        Loop(baseline=baseline).run(),
    )
    for loop, first in ((early, (early.steps[0].score,)), (usual, ())):
        assert loop.grower.env is not None
        assert loop.grower.env.rules is not None
        expected = [100 * score for score in (*first, *baseline)]
        assert loop.grower.env.rules.baseline.accuracy == pytest.approx(expected)


def grower_at_once(
    controller: OwnController | str, **env: Any
) -> tuple[Grower, nn.Module]:
    """A Grower of a model with two places that can be wider."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Grower(
        model,
        ["0 -> 2", "2 -> 4"],
        optimizer,
        controller,
        6,
        config={"env": env},
        example=torch.randn(4, 8),
    ), model


def right(model: nn.Module) -> torch.Tensor:
    return (model(torch.ones(16, 8)).argmax(1) == 0).float()


def test_a_rule_plants_all_seeds_that_join_the_model_at_once_before_the_next_epoch() -> (
    None
):
    grower, _ = grower_at_once("heuristic")
    step = grower.start(right)
    assert {slot.stage for slot in step.slots.values()} == {"FOSSILIZED"}
    assert str(step).count("kept at once") == 2
    assert grower.epoch == 0


@pytest.mark.parametrize("edits", [1, 2, 8])
def test_an_agent_takes_the_decisions_of_an_epoch(edits: int) -> None:
    class Agent:
        """Plants as the rule does, but is none."""

        def __init__(self, env: LoopEnv) -> None:
            self.rule = HeuristicController(
                env.action_spec, env.layout, 1, config=env.config
            )
            self.begin, self.act, self.episode = (
                self.rule.begin,
                self.rule.act,
                self.rule.episode,
            )
            self.memory_state, self.load_memory_state = (
                self.rule.memory_state,
                self.rule.load_memory_state,
            )

    grower, _ = grower_at_once(Agent, edits_per_epoch=edits)  # type: ignore[arg-type]
    step = grower.start(right)
    kept = [slot.stage for slot in step.slots.values()].count("FOSSILIZED")
    assert kept == min(edits, 2)
    env = grower.env
    assert env is not None
    assert env.state.trained[0], "the loop trains now"
    assert env.state.edits[0] == kept
    # The last one that may be taken is paid for with the epoch.
    at_once = kept if edits > kept else kept - 1
    assert env.state.edit_reward[0] == pytest.approx(-0.015 * at_once)
