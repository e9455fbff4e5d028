"""Custom controllers: callables and ``path.py:function``, in every place that takes a controller."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

import esper
from esper.agents.controller import EnvView, PerEnvController
from esper.agents.heuristic import HeuristicController
from esper.agents.make import controller_for
from esper.compare.comparison import compare_controllers
from esper.config import ConfigError, TrainingConfig
from esper.data.user_code import confirmed
from esper.env.make import make_env
from esper.env.slot_env import SlotVectorEnv
from esper.run.experiment import Experiment
from esper.run.rollout import play_round

PLANTED = TrainingConfig.parse(
    {"task": {"name": "planted"}, "env": {"n_envs": 3, "episode_length": 20}}
)
FILE = """
from esper.agents.heuristic import HeuristicController
from rules import Rule


def make_controller(env):
    assert env.num_envs > 0
    return HeuristicController(env.action_spec, env.layout, env.num_envs)


def fails(env):
    return 1 / 0


def a_number(env):
    return 3
"""
RULES = "from esper.agents.heuristic import HeuristicController as Rule\n"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file with a neighbour; what loading it adds to ``sys`` is undone."""
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.delitem(sys.modules, "rules", raising=False)
    (tmp_path / "mine.py").write_text(FILE)
    (tmp_path / "rules.py").write_text(RULES)
    monkeypatch.chdir(tmp_path)
    return "mine.py"


def make_controller(env: SlotVectorEnv) -> HeuristicController:
    return HeuristicController(env.action_spec, env.layout, env.num_envs)


class Waits(PerEnvController):
    def choose(self, env: int, view: EnvView) -> NDArray[np.int64]:
        return np.zeros(8, dtype=np.int64)


def returns(controller: Any) -> list[float]:
    env = make_env(PLANTED)
    return list(
        play_round(env, controller_for(controller, PLANTED, env, 0), seed=3).returns
    )


@pytest.mark.parametrize("function", ["make_controller", "Rule"])
def test_a_file_names_a_function_or_a_rule(file: str, function: str) -> None:
    assert returns(f"{file}:{function}") == returns("heuristic") != returns("none")


def test_a_callable_or_a_rule_is_a_controller() -> None:
    assert (
        returns(make_controller) == returns(HeuristicController) == returns("heuristic")
    )
    assert returns(Waits) == returns("none")


@pytest.mark.parametrize(
    ("chosen", "reason"),
    [
        (np.full(8, 0.5), "must be integers"),
        ([False] * 8, "must be integers"),
        (None, "must be integers"),
        (0, r"shape \(\), expected \(8,\)"),
        ([0, 0], r"shape \(2,\), expected \(8,\)"),
    ],
)
def test_a_rule_that_chooses_no_action_is_refused(chosen: Any, reason: str) -> None:
    class Chooses(Waits):
        def choose(self, env: int, view: EnvView) -> Any:
            return chosen

    with pytest.raises(ValueError, match=reason):
        returns(Chooses)


def test_a_rule_may_choose_a_list_or_a_tensor() -> None:
    for chosen in ([0] * 8, torch.zeros(8, dtype=torch.int32)):

        class Chooses(Waits):
            def choose(self, env: int, view: EnvView, chosen: Any = chosen) -> Any:
                return chosen

        assert returns(Chooses) == returns("none")


def no_members(env: SlotVectorEnv) -> Any:
    return SimpleNamespace(act=None)


def one_episode(env: SlotVectorEnv) -> Any:
    controller = make_controller(env)
    controller.episode = np.zeros(1)
    return controller


def test_each_mistake_is_one_error(file: str) -> None:
    wrong = {
        "gone.py:make": "controller 'gone.py:make': there is no file gone.py",
        f"{file}:gone": "it has no function gone",
        f"{file}:fails": "line 12: ZeroDivisionError",
        f"{file}:a_number": "a_number returned int, which has no episode, begin, act, memory_state",
        file: "not of the form path.py:function",
        "callable:x": "unknown controller 'callable:x'; known: ppo, checkpoint:PATH",
        no_members: "returned SimpleNamespace, which has no episode, begin, memory_state, load_memory_state; a con",
        one_episode: r"episode has shape \[1\]; expected an int array \[3\]",
    }
    for controller, message in wrong.items():
        with pytest.raises(ConfigError, match=message):
            returns(controller)
    with pytest.raises(
        ConfigError,
        match="controller is a Waits; expected a name, or a function that makes",
    ):
        returns(controller_for(Waits, PLANTED, make_env(PLANTED), 0))


def test_comparisons_play_them_beside_others(file: str) -> None:
    arms = compare_controllers(
        PLANTED,
        ["heuristic", f"{file}:make_controller", make_controller, "none"],
        pairs=3,
    )
    assert [arm.controller for arm in arms[:2]] == [
        "heuristic",
        "mine.py:make_controller",
    ]
    for arm in arms[1:3]:
        np.testing.assert_array_equal(arm.accuracy, arms[0].accuracy)
    assert (arms[0].accuracy != arms[3].accuracy).any()
    twice = [partial(make_controller), partial(make_controller)]
    with pytest.raises(
        ConfigError, match="given twice: callable:make_controller; name each"
    ):
        compare_controllers(PLANTED, twice)
    named = compare_controllers(PLANTED, dict(zip("ab", twice, strict=True)), pairs=3)
    assert [arm.controller for arm in named] == ["a", "b"]


def test_a_grower_takes_them(file: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for controller in (Waits, f"{file}:make_controller"):
        grower = esper.Grower(
            model, {"r0c0": "0"}, optimizer, controller, horizon=2, topology="mlp"
        )
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        assert grower.step(lambda model: 0.5).action is None
        grower.finish()
    with pytest.raises(
        ConfigError, match="it has no function gone"
    ):  # before anything is trained
        esper.Grower(model, {"r0c0": "0"}, optimizer, f"{file}:gone", topology="mlp")


def played(controller: Any, folder: Path, **keywords: Any) -> Any:
    config = PLANTED.with_values(
        run={"rounds": 2, "evaluation_pairs": 3}, env={"episode_length": 8}
    )
    return Experiment(config, folder, controller=controller, **keywords).run()


def interrupted(controller: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from esper.run.rollout import Collector

    play, calls = Collector.play, []

    def stop(self: Collector) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return play(self)

    with monkeypatch.context() as patch:
        patch.setattr(Collector, "play", stop)
        assert played(controller, folder).interrupted


def test_a_run_records_it_and_resumes_when_it_is_named_again(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"{file}:make_controller"
    whole = played(name, tmp_path / "whole")
    assert f'controller = "{name}"' in (tmp_path / "whole" / "config.toml").read_text()
    interrupted(name, tmp_path / "run", monkeypatch)
    with pytest.raises(
        ConfigError,
        match=r"names the controller 'mine\.py:make_controller', .* name it: --controller",
    ):
        Experiment.resume(tmp_path / "run")
    with pytest.raises(
        ConfigError,
        match=r"run of the controller 'mine\.py:make_controller', not of 'mine\.py:Rule'",
    ):
        Experiment.resume(tmp_path / "run", controller=f"{file}:Rule")
    assert (
        Experiment.resume(tmp_path / "run", controller=name).run().comparison
        == whole.comparison
    )


def test_a_controller_that_may_have_learned_plays_held_out_hosts(
    tmp_path: Path,
) -> None:
    """A rule has learned from no host; another controller may have, like a trained agent."""

    class Agent:
        def __init__(self, env: SlotVectorEnv) -> None:
            self.rule, self.episode = (
                Waits(env.action_spec, env.layout, env.num_envs),
                np.full(env.num_envs, -1),
            )

        def begin(self) -> None:
            self.episode += 1

        def act(
            self,
            observation: NDArray[np.float32],
            masks: Mapping[str, NDArray[np.bool_]],
        ) -> NDArray[np.int64]:
            return self.rule.act(observation, masks)

        def memory_state(self) -> dict[str, Any]:
            return {}

        def load_memory_state(self, state: Mapping[str, Any]) -> None:
            pass

    config = PLANTED.with_values(run={"seed": 5, "rounds": 1})
    seeds = {}
    for controller in (Waits, Agent):
        with Experiment(
            config, tmp_path / controller.__name__, controller=controller
        ) as experiment:
            experiment.run()
            seeds[controller] = {
                env.run_seed for env in experiment.trainer.collector.envs
            }
    assert seeds == {Waits: {5}, Agent: {5 + 2**31}}


def test_another_controller_is_not_resumed_with() -> None:
    assert confirmed("controller", "heuristic", None, "runs/x") == "heuristic"
    assert confirmed("controller", "a.py:f", "b/a.py:f", "runs/x") == "b/a.py:f"
    with pytest.raises(
        ConfigError, match=r"cannot be resumed: its controller was the callable f, "
    ):
        confirmed("controller", "callable:f", make_controller, "runs/x")
    for found, given in [
        ("heuristic", "random"),
        ("heuristic", "a.py:f"),
        ("a.py:f", "random"),
        ("a.py:f", "a.py:g"),
    ]:
        with pytest.raises(ConfigError, match="is a run of the controller"):
            confirmed("controller", found, given, "runs/x")
