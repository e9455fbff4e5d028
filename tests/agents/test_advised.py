from __future__ import annotations

import numpy as np
import pytest

from benchmarks.exam_play import facts_of
from esper.agents.advised import AdvisedController, facts_in
from esper.agents.advisor import Advisor, HostFacts
from esper.agents.controller import EnvView
from esper.config import ConfigError, TrainingConfig
from esper.core.action import Op
from esper.core.sizing import FACTORS, WIDENINGS
from esper.env.vector_env import GrowthVectorEnv
from esper.exam.context import Context, task_of

CONTEXTS = {
    "cnn": Context(
        "digits", width=3, samples=60, epochs=4, price=1.0, optimizer="sgd", key=7
    ),
    "mlp": Context("made_table_1", width=5, samples=60, epochs=4, price=1.0, key=7),
}
SLOTS = ("r2c0", "r2c1")


class Says(Advisor):
    """An advisor that always says the same."""

    def __init__(self, multiple: int) -> None:
        super().__init__(entries=1)
        self.multiple = multiple

    def choose(self, facts: HostFacts, price: float) -> int:
        return self.multiple

    def words(self, facts: HostFacts, price: float) -> str:
        return "because"


def env_of(
    context: Context,
    blueprints: tuple[str, ...] = tuple(WIDENINGS.values()),
    budget: float = 1_000.0,
) -> GrowthVectorEnv:
    env = {
        "n_envs": 1,
        "slots": list(SLOTS),
        "blueprints": list(blueprints),
        "edits_per_epoch": 8,
        "baseline_episodes": 1,
        "parameter_budget": budget,
        "episode_length": context.epochs,
    }
    return GrowthVectorEnv(task_of(context), TrainingConfig().with_values(env=env))


@pytest.mark.parametrize("name", CONTEXTS)
def test_an_observation_tells_the_facts_of_a_context(name: str) -> None:
    context = CONTEXTS[name]
    env = env_of(context)
    observation, info = env.reset(seed=0)
    masks = {head: mask[0] for head, mask in info["action_mask"].items()}
    view = EnvView(env.action_spec, env.layout, observation[0], masks)
    told = facts_in(view, list(SLOTS), tuple(WIDENINGS))
    wanted = facts_of(context)
    assert told.widths == pytest.approx(wanted.widths, rel=1e-3)
    assert list(told.parameters) == list(FACTORS)
    for multiple, parameters in wanted.parameters.items():
        assert told.parameters[multiple] == pytest.approx(parameters, rel=0.01)
    for fact in ("inputs", "classes", "samples", "epochs", "convolutional"):
        assert getattr(told, fact) == getattr(wanted, fact), fact
    assert told.updates == pytest.approx(wanted.updates, rel=1e-3)
    assert told.rate == pytest.approx(wanted.rate, rel=1e-3)
    assert told.operations == pytest.approx(wanted.operations, rel=0.01)


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Advisor:
    advisor = Says(4)
    monkeypatch.setattr("esper.agents.advised.shipped", lambda: advisor)
    return advisor


def test_all_layers_are_widened_before_the_first_epoch(says: Says) -> None:
    env = env_of(CONTEXTS["cnn"])
    controller = AdvisedController(env.action_spec, env.layout, 1)
    observation, info = env.reset(seed=0)
    controller.begin()
    planted = []
    while True:
        (action,) = controller.act(observation, info["action_mask"])
        if action[0] == Op.WAIT:
            break
        planted.append(
            (env.action_spec.slots[action[1]], env.action_spec.blueprints[action[2]])
        )
        observation, _, _, _, info = env.step(action[None])
    assert planted == [(slot, "widen_x4") for slot in SLOTS]
    assert env.state.epoch[0] == 0


def test_nothing_grows_where_the_advisor_declines(says: Says) -> None:
    says.multiple = 1
    env = env_of(CONTEXTS["cnn"])
    controller = AdvisedController(env.action_spec, env.layout, 1)
    observation, info = env.reset(seed=0)
    controller.begin()
    assert controller.act(observation, info["action_mask"])[0, 0] == Op.WAIT


def test_a_host_without_widenings_is_refused() -> None:
    env = env_of(CONTEXTS["cnn"], blueprints=("widen_half",))
    with pytest.raises(ConfigError, match="widen_x8"):
        AdvisedController(env.action_spec, env.layout, 1)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("samples_known", "number of training samples"),
        ("chance_known", "number of classes"),
        ("updates_known", "number of steps in an epoch"),
        ("inputs", "size of a sample"),
        ("host_flops", "operations of a pass"),
    ],
)
def test_a_fact_that_is_not_known_is_refused_not_guessed(
    entry: str, words: str
) -> None:
    env = env_of(CONTEXTS["cnn"])
    observation = env.reset(seed=0)[0].copy()
    observation[:, env.layout.index[entry]] = 0
    view = EnvView(env.action_spec, env.layout, observation[0], {})
    with pytest.raises(ConfigError, match=words):
        facts_in(view, list(SLOTS), (2, 4, 8))


def test_multiples_beyond_the_budget_are_not_offered_and_the_others_are() -> None:
    env = env_of(CONTEXTS["cnn"], budget=2.0)  # ×8 does not fit, ×2 does
    observation, info = env.reset(seed=0)
    controller = AdvisedController(env.action_spec, env.layout, 1)
    offered = []

    class Asked(Says):
        def choose(self, facts: HostFacts, price: float) -> int:
            offered.extend(facts.parameters)
            return offered[-1]

    controller.advisor = Asked(1)
    controller.begin()
    (action,) = controller.act(observation, info["action_mask"])
    assert offered[:2] == [1, 2]
    assert 8 not in offered
    assert action[0] == Op.GERMINATE


def test_a_copied_state_goes_on_with_the_same_plan(says: Says) -> None:
    env = env_of(CONTEXTS["mlp"])
    observation, info = env.reset(seed=0)
    first = AdvisedController(env.action_spec, env.layout, 1)
    first.begin()
    first.act(observation, info["action_mask"])
    second = AdvisedController(env.action_spec, env.layout, 1)
    second.load_memory_state(first.memory_state())
    np.testing.assert_array_equal(
        first.act(observation, info["action_mask"]),
        second.act(observation, info["action_mask"]),
    )
