"""Hosts that differ: each episode of an env is what a vector env of its one context would be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from esper.agents.advised import AdvisedController
from esper.agents.heuristic import HeuristicController, NeedController
from esper.config import ConfigError, TrainingConfig
from esper.core.action import Op
from esper.data.names import DRAWN
from esper.env.make import EnvMaker, make_env
from esper.env.varied import BLUEPRINTS_OFFERED, NAME, SLOTS, VariedVectorEnv, resolve
from esper.env.vector_env import GrowthVectorEnv
from esper.exam.context import Law, task_of
from esper.run.rollout import play_round
from esper.telemetry.event import ContextDrawn, EpisodeCompleted, Event
from tests.selection import slow_except

SHORT = Law(
    ("made_table_1", "made_images_2", "digits"),
    cnn_widths=(1, 2),
    mlp_widths=(2, 3, 5),
    cnn_epochs=(2, 3),
    mlp_epochs=(2, 4),
    samples=(40, 70),
    left_out=None,
)


def varied(
    n_envs: int = 6, seed: int = 0, emit: Any = None, need_every: int = 0, **ppo: Any
) -> VariedVectorEnv:
    config = TrainingConfig.parse(
        {
            "env": {"n_envs": n_envs, "need_every": need_every},
            "run": {"seed": seed},
            "ppo": {"group": 1, **ppo},
        }
    )
    return VariedVectorEnv(config, emit, law=SHORT)


def widened(
    env: VariedVectorEnv, info: dict[str, Any], blueprint: str = "widen_x4"
) -> np.ndarray:
    """Actions that widen the first free layer of each env, where that is on offer."""
    actions = np.zeros((env.num_envs, 8), dtype=np.int64)
    b = env.action_spec.blueprints.index(blueprint)
    masks = info["action_mask"]
    for row in range(env.num_envs):
        for s, slot in enumerate(SLOTS):
            if (
                masks["op_slot"][row, Op.GERMINATE, s]
                and masks["slot_blueprint"][row, s, b]
            ):
                actions[row] = env.action_spec.encode(Op.GERMINATE, slot, blueprint)
                break
    return actions


def alone(env: VariedVectorEnv, row: int) -> GrowthVectorEnv:
    """An env of the context of one row."""
    context = env.contexts[row]
    values = env.config.tables_with(
        {
            "env": {
                "n_envs": 1,
                "episode_length": context.epochs,
                "slots": None,
                "baseline_episodes": 1,
            },
            "reward": {"price": context.price},
        }
    )
    return GrowthVectorEnv(task_of(context), TrainingConfig.parse(values))


def test_contexts_depend_on_the_run_seed_and_the_number_of_the_episode_only() -> None:
    few, many = varied(2), varied(6)
    of_few = [
        few.context_of(5, row, episode) for episode in range(3) for row in range(2)
    ]
    of_many = [many.context_of(5, row, 0) for row in range(6)]
    assert of_few == of_many
    assert len(set(of_few)) == 6
    assert few.context_of(6, 0, 0) != of_few[0]


def test_envs_of_a_group_play_one_context_but_not_where_they_are_judged() -> None:
    env = varied(6, group=3)
    env.reset(seed=4)
    contexts = env.contexts.copy()
    assert contexts[0] == contexts[2] != contexts[3] == contexts[5]
    env.configure(grouped=False)
    env.configure(run_seed=4)
    env.reset(seed=4)
    assert len(set(env.contexts)) == 6
    env.configure(grouped=True)
    env.reset(seed=4)
    assert list(env.contexts) == list(contexts)


@pytest.mark.parametrize("grows", slow_except([True], [True, False]))
def test_an_env_shows_and_pays_what_one_of_its_context_alone_does(grows: bool) -> None:
    """Row 0, whose host has the random numbers of the other env's only one."""
    for seed in range(4):
        env = varied(4, seed)
        observation, info = env.reset(seed=seed)
        other = alone(env, 0)
        other_observation, _ = other.reset(seed=seed)
        total, other_total = 0.0, 0.0
        while not env.done[0]:
            np.testing.assert_array_equal(observation[0], other_observation[0])
            actions = (
                widened(env, info)
                if grows and env.state.epoch[0] == 0
                else np.zeros((4, 8), dtype=np.int64)
            )
            observation, rewards, _, _, info = env.step(actions)
            other_observation, other_rewards, _, _, _ = other.step(actions[:1])
            total += rewards[0]
            other_total += other_rewards[0]
        assert other.done[0]
        assert total == other_total


def test_rewards_add_up_to_the_accuracy_minus_the_price_of_each_host() -> None:
    env = varied(6)
    _, info = env.reset(seed=1)
    total = np.zeros(6)
    while not env.done.all():
        _, rewards, _, _, info = env.step(widened(env, info))
        total += rewards
    contexts = env.contexts
    first = np.array([context.parameters() for context in contexts])
    np.testing.assert_array_equal(env.first_parameters, first)
    grown = first + env.state.slots.fossil_parameters
    prices = np.array([context.price for context in contexts])
    paid = prices * np.log2(grown / first)
    assert (paid > 0).any()
    scale = env.config.reward.benefit_scale
    np.testing.assert_allclose(total * scale, env.state.committed - paid, atol=1e-9)
    # The score of an arm is the same on the test split.
    tested = super(VariedVectorEnv, env).test_accuracy()
    np.testing.assert_allclose(env.test_accuracy(), tested - paid, atol=1e-9)


def test_a_layer_is_not_widened_beyond_what_contexts_allow() -> None:
    env = VariedVectorEnv(
        TrainingConfig.parse({"env": {"n_envs": 2}}),
        law=replace(SHORT, mlp_widths=(24,), cnn_widths=(12,)),
    )
    env.reset(seed=0)
    fits = env.choices.parameters > 0
    widest = np.where(
        [[context.topology == "cnn"] for context in env.contexts], 64, 128
    )
    for b, factor in enumerate((2, 4, 8, 16)):
        np.testing.assert_array_equal(
            fits[:, :, b], env.choices.widths * factor <= widest
        )


def test_a_saved_env_goes_on_with_the_same_bits() -> None:
    env = varied(4)
    _, info = env.reset(seed=2)
    _, _, _, _, info = env.step(widened(env, info))
    state = env.state_dict()
    seen: list[Event] = []
    resumed = varied(4, seed=9, emit=seen.append)
    observation, _ = resumed.load_state_dict(state)
    assert list(resumed.contexts) == list(env.contexts)
    assert not seen, "they were reported when their episodes began"
    np.testing.assert_array_equal(observation, env._observe(env.rules))
    waits = np.zeros((4, 8), dtype=np.int64)
    while not env.done.all():
        expected = env.step(waits)
        found = resumed.step(waits)
        for one, other in zip(expected[:4], found[:4], strict=True):
            np.testing.assert_array_equal(one, other)
    # The next episodes are those of the same run seed.
    np.testing.assert_array_equal(env.reset()[0], resumed.reset()[0])


@pytest.mark.parametrize(
    "rule", [HeuristicController, NeedController, AdvisedController]
)
def test_a_rule_acts_in_a_mixed_vector_as_it_does_alone(rule: Any) -> None:
    """It reads its clock by the horizon of the env."""
    env = varied(4, need_every=1)
    observation, info = env.reset(seed=3)
    other = alone(env, 0)
    seen, known = other.reset(seed=3)
    mixed = rule(env.action_spec, env.layout, 4, config=env.config)
    single = rule(other.action_spec, other.layout, 1, config=other.config)
    mixed.begin()
    single.begin()
    while not env.done[0]:
        actions = mixed.act(observation, info["action_mask"])
        np.testing.assert_array_equal(
            actions[:1], single.act(seen, known["action_mask"])
        )
        observation, _, _, _, info = env.step(actions)
        seen, _, _, _, known = other.step(actions[:1])


def test_of_heads_that_do_nothing_here_one_choice_is_legal() -> None:
    env = varied(2)
    _, info = env.reset(seed=0)
    for head in ("style", "tempo", "alpha_target"):
        assert info["action_mask"][head].sum(axis=1).tolist() == [1, 1]


def test_each_episode_is_reported_with_its_context() -> None:
    seen: list[Event] = []
    env = varied(3, emit=seen.append)
    play_round(env, AdvisedController(env.action_spec, env.layout, 3), seed=0)
    drawn = [event for event in seen if isinstance(event, ContextDrawn)]
    for event, context in zip(drawn, env.contexts, strict=True):
        assert (event.source, event.width, event.price) == (
            context.source,
            context.width,
            context.price,
        )
    ended = {event.env: event for event in seen if isinstance(event, EpisodeCompleted)}
    for row, context in enumerate(env.contexts):
        assert ended[row].host_parameters == context.parameters()
        assert ended[row].epochs == context.epochs


def test_minimal_telemetry_reports_no_contexts() -> None:
    seen: list[Event] = []
    config = TrainingConfig.parse(
        {"env": {"n_envs": 2}, "telemetry": {"level": "minimal"}, "ppo": {"group": 1}}
    )
    VariedVectorEnv(config, seen.append, law=SHORT).reset(seed=0)
    assert seen == []


@pytest.mark.parametrize(
    "values",
    [
        {"env": {"episode_length": 9}},
        {"env": {"slots": ["r0"]}},
        {"env": {"blueprints": ["widen_half"]}},
        {
            "reward": {"mode": "shaped", "rent_rate": 1.0},
            "env": {"blueprints": ["conv_light"]},
        },
        {"run": {"device": "cuda"}},
    ],
)
def test_settings_that_contexts_decide_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="task varied"):
        resolve(TrainingConfig.parse(values))


@pytest.mark.parametrize(("n_envs", "group"), [(8, 4), (6, 1)])
def test_envs_form_groups_of_four_where_they_can(n_envs: int, group: int) -> None:
    """Whatever else a config has been given, and if it is resolved again."""
    config = TrainingConfig.parse({"task": {"name": NAME}}).with_values(
        env={"n_envs": n_envs}, run={"seed": 3}
    )
    maker = EnvMaker.of(config)
    assert maker.config.ppo.group == group
    assert maker.make().group == group
    one_each = config.with_values(ppo={"group": 1})
    assert EnvMaker.of(one_each).make().group == 1


def test_the_task_has_an_env_by_its_name() -> None:
    assert NAME in DRAWN
    config = TrainingConfig.parse({"task": {"name": NAME}, "env": {"n_envs": 4}})
    env = make_env(config)
    assert isinstance(env, VariedVectorEnv)
    assert env.action_spec.blueprints == BLUEPRINTS_OFFERED
    assert EnvMaker.of(config).score.name == "return"


def test_curves_of_other_hosts_are_not_made_up() -> None:
    env = varied(2)
    _, info = env.reset(seed=0)
    assert np.isnan(info["baseline_accuracy"]).all()
    assert torch.isfinite(torch.from_numpy(env.reset(seed=1)[0])).all()
