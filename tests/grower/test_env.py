"""The env of a loop: its first observation, early starts, and the baseline."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from esper.agents.heuristic import HeuristicController
from esper.agents.make import OwnController
from esper.config import ConfigError
from esper.grower.env import LoopEnv
from esper.grower.grower import Grower
from tests.core_helpers import EASY_GATES, Rig, digits, rig
from tests.grower.loops import GROW, Loop, Script, same, stages, weights


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


class Mirror:
    """A loop whose model is always what the host of ``world`` is, which trains as its epochs do."""

    def __init__(self, world: Rig, **known: Any) -> None:
        self.world = world
        self.model = nn.Sequential(*copy.deepcopy(world.training().host.segments))  # type: ignore[arg-type]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.grower = Grower(
            self.model,
            {"r0c0": "0", "r1c0": "1", "r0c1": "2", "r1c1": "3"},
            self.optimizer,
            "none",
            world.env.horizon,
            topology="cnn",
            config={"env": {"at_once": False, "gates": EASY_GATES}},
            **known,
        )

    def follow(self) -> None:
        """Trains two steps that change no weight, and takes over the host's."""
        for _ in range(2):
            self.model.train()
            self.optimizer.zero_grad()
            (self.model(digits().train.x[:32]).sum() * 0).backward()
            self.optimizer.step()
        state = self.world.training().host.segments.state_dict()  # type: ignore[operator, union-attr]
        self.model.load_state_dict(state)

    def evaluate(self, model: nn.Module) -> Any:
        data = digits().validation
        logits = model.eval()(data.x)
        right = (logits.argmax(1) == data.y).float()
        return right, functional.cross_entropy(logits, data.y, reduction="none")

    def observation(self) -> np.ndarray[Any, Any]:
        env = self.grower.env
        assert env is not None
        assert env.layout.entries == self.world.env.layout.entries
        return env._observe(env.rules)[0]


def test_a_model_in_a_loop_shows_what_it_shows_as_a_host_in_training() -> None:
    with rig(horizon=5, env={"need_every": 0}) as world:
        world.reset(seed=0)
        loop = Mirror(world, samples=len(digits().train.y), classes=10)
        loop.grower.start(loop.evaluate)
        first = loop.observation()
        for name in ("updates_left", "updates_known"):  # no epoch has shown them
            place = world.env.layout.index[name]
            assert first[place] == 0
            first[place] = world.observation[0, place]
        np.testing.assert_allclose(first, world.observation[0], rtol=1e-4, atol=1e-4)
        for _ in range(4):
            world.step()
            loop.follow()
            now = world.measurement()
            accuracy = float(world.env.state.train_accuracy[0]) / 100
            loop.grower.step(loop.evaluate, training=(now.train_loss, accuracy))
            np.testing.assert_allclose(
                loop.observation(), world.observation[0], rtol=1e-4, atol=1e-4
            )
        read = world.env.layout.index
        known = ("samples_known", "updates_known", "chance_known", "train_measured")
        assert [world.observation[0, read[name]] for name in known] == [1.0] * 4


def test_what_a_loop_does_not_say_is_marked_as_unknown() -> None:
    with rig(horizon=5) as world:
        loop = Mirror(world)
        loop.follow()
        loop.grower.step(loop.evaluate)
        seen = loop.observation()
        read = world.env.layout.index
        unknown = ("samples", "samples_known", "classes", "chance_known")
        unknown += ("train_loss", "train_measured", "loss_gap", "accuracy_gap")
        assert [seen[read[name]] for name in unknown] == [0.0] * 8
        assert seen[read["validation_loss"]] == pytest.approx(np.log(2))  # the first


def test_the_number_of_samples_is_that_of_a_loader() -> None:
    data = torch.utils.data.TensorDataset(torch.zeros(40, 2))
    with rig(horizon=5) as world:
        loader = torch.utils.data.DataLoader(data, batch_size=16)
        loop = Mirror(world, samples=loader)
        loop.grower.start(loop.evaluate)
        assert loop.grower.env is not None
        assert loop.grower.env.setting.samples == 40
        assert loop.grower.env.setting.updates == 3
        for wrong in (0, 2.5, "many"):
            with pytest.raises(ConfigError, match="samples is"):
                Mirror(world, samples=wrong)


@pytest.mark.parametrize("wrong", [np.zeros((1, 8)), [[True] * 8], None, [0] * 8])
def test_a_controller_of_a_loop_that_returns_no_actions_is_refused(wrong: Any) -> None:
    class Acts(Script):
        def act(self, observation: Any, masks: Any) -> Any:
            return wrong

    loop = Loop(controller=lambda env: Acts(env, {}))
    with pytest.raises(ValueError, match=r"must be integers|expected \(1, 8\)"):
        loop.run(1)


def test_a_controller_of_a_loop_may_return_lists() -> None:
    class Acts(Script):
        def act(self, observation: Any, masks: Any) -> Any:
            return super().act(observation, masks).tolist()

    loop = Loop(controller=lambda env: Acts(env, GROW)).run(3)
    assert loop.grower.hooks.sites["r0c0"].seed is not None
