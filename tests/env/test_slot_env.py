"""Ends of episodes in both autoreset modes, on hosts in training and on simulated ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers.vector import DictInfoToList
from numpy.typing import NDArray

from esper.config import TrainingConfig
from esper.core.action import Op
from esper.env.planted import PlantedVectorEnv
from esper.env.slot_env import SlotVectorEnv
from esper.env.vector_env import GrowthVectorEnv
from tests.core_helpers import digits, flat_baseline, tiny_config, wait_actions

SAME, DISABLED = AutoresetMode.SAME_STEP, AutoresetMode.DISABLED
Make = Callable[..., SlotVectorEnv]


def trained(
    n_envs: int,
    horizon: int,
    mode: AutoresetMode = DISABLED,
    **sections: dict[str, Any],
) -> SlotVectorEnv:
    config = tiny_config(n_envs, horizon, **sections)
    return GrowthVectorEnv(
        digits(), config, baseline=flat_baseline(horizon), autoreset_mode=mode
    )


def simulated(
    n_envs: int, horizon: int, mode: AutoresetMode = DISABLED
) -> SlotVectorEnv:
    config = TrainingConfig.parse(
        {"env": {"n_envs": n_envs, "episode_length": horizon}}
    )
    return PlantedVectorEnv(config, autoreset_mode=mode)


@pytest.fixture
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Envs of one kind, simulated ones by default, closed after the test."""
    kind = getattr(request, "param", simulated)
    with ExitStack() as stack:

        def made(*arguments: Any, **keywords: Any) -> SlotVectorEnv:
            env: SlotVectorEnv = kind(*arguments, **keywords)
            stack.callback(env.close)
            return env

        yield made


def germinate(env: SlotVectorEnv) -> NDArray[np.int64]:
    """GERMINATE in every env: something to be seen in observation, mask and reward."""
    first = env.action_spec.blueprints[0]
    return np.stack(
        [env.action_spec.encode(Op.GERMINATE, "r0c0", first)] * env.num_envs
    )


def same(first: Any, second: Any, path: str = "") -> None:
    """Equal dicts of arrays, with equal types."""
    if isinstance(first, dict):
        assert first.keys() == second.keys(), path
        for key in first:
            same(first[key], second[key], f"{path}/{key}")
    else:
        assert (first.shape, first.dtype) == (second.shape, second.dtype), path
        np.testing.assert_array_equal(first, second, err_msg=path)


def test_the_mode_belongs_to_the_instance_and_is_disabled_unless_asked_for(
    make: Make,
) -> None:
    asked, default = make(1, 2, SAME), make(1, 2)
    assert asked.metadata["autoreset_mode"] is SAME
    assert default.metadata["autoreset_mode"] is DISABLED
    assert SlotVectorEnv.metadata["autoreset_mode"] is DISABLED


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, "NextStep", "same"])
def test_an_unknown_autoreset_mode_is_refused_with_the_known_ones(mode: Any) -> None:
    with pytest.raises(
        ValueError,
        match=r"AutoresetMode.SAME_STEP \('SameStep'\) or AutoresetMode.DISABLED",
    ):
        PlantedVectorEnv(autoreset_mode=mode)


@pytest.mark.parametrize("make", [trained, simulated], indirect=True)
def test_same_step_is_disabled_with_a_reset_after_every_end(make: Make) -> None:
    """SAME_STEP returns the same bits as DISABLED with a reset right after each end."""
    auto, manual = make(3, 3, SAME), make(3, 3)
    observation, info = auto.reset(seed=5)
    expected, expected_info = manual.reset(seed=5)
    np.testing.assert_array_equal(observation, expected)
    same(info, expected_info)
    for step in range(1, 8):  # two episodes and a step of the third
        actions = germinate(auto) if step % 2 else wait_actions(3)
        observation, *results, info = auto.step(actions)
        expected, *expected_results, expected_info = manual.step(actions)
        for result, wanted in zip(results, expected_results, strict=True):
            np.testing.assert_array_equal(result, wanted)
        assert results[1].tolist() == [step % 3 == 0] * 3
        assert ("final_obs" in info) == (step % 3 == 0)
        if step % 3 == 0:
            np.testing.assert_array_equal(np.stack(info["final_obs"]), expected)
            final = {
                key: value
                for key, value in info["final_info"].items()
                if not key.startswith("_")
            }
            final["action_mask"] = {
                k: v for k, v in final["action_mask"].items() if not k.startswith("_")
            }
            final["reward_terms"] = {
                k: v for k, v in final["reward_terms"].items() if not k.startswith("_")
            }
            same(final, expected_info)
            expected, expected_info = manual.reset(
                options={"reset_mask": np.ones(3, dtype=np.bool_)}
            )
            assert auto.layout.read(observation, "epoch").tolist() == [0] * 3
        np.testing.assert_array_equal(observation, expected)
        same(
            {key: value for key, value in info.items() if "final" not in key},
            expected_info,
        )
        np.testing.assert_array_equal(auto.action_masks(), manual.action_masks())


def test_envs_that_end_at_different_times(make: Make) -> None:
    env = make(2, 4, SAME)
    env.reset(seed=0)
    env.step(wait_actions(2))
    env.reset(options={"reset_mask": np.array([False, True])})
    for _ in range(3):
        observation, rewards, terminated, _, info = env.step(germinate(env))
    assert terminated.tolist() == [True, False]
    assert info["_final_info"].tolist() == info["_final_obs"].tolist() == [True, False]
    assert info["final_obs"][1] is None
    assert env.layout.read(info["final_obs"][0], "epoch") == 1
    assert env.layout.read(observation, "epoch").tolist() == [0, 0.75]
    final = info["final_info"]
    assert final["validation_accuracy"][0] > 0
    assert final["validation_accuracy"][1] == 0
    assert (
        final["action_mask"]["_op"].tolist()
        == final["_action_mask"].tolist()
        == [True, False]
    )
    assert sum(
        term[0] for name, term in final["reward_terms"].items() if name[0] != "_"
    ) == pytest.approx(rewards[0])
    assert not final["action_mask"]["op"][0, Op.GERMINATE], (
        "one seed is incubating in the ended state"
    )
    assert info["action_mask"]["op"][0, Op.GERMINATE], (
        "and none in the first state of the next episode"
    )
    assert info["idle"].tolist() == [False, False]
    assert [
        part.get("final_info", {}).keys()
        for part in DictInfoToList(env)._convert_info_to_list(info)
    ][1] == set()


@pytest.mark.parametrize("make", [trained, simulated], indirect=True)
def test_returned_arrays_belong_to_the_caller(make: Make) -> None:
    env, untouched = make(2, 2, SAME), make(2, 2, SAME)
    env.reset(seed=0)
    untouched.reset(seed=0)
    for _ in range(3):
        observation, _, _, _, info = env.step(wait_actions(2))
        untouched.step(wait_actions(2))
        observation[:] = 0
        for mask in info["action_mask"].values():
            mask[:] = False
        np.testing.assert_array_equal(env.action_masks(), untouched.action_masks())


@pytest.mark.parametrize(
    "mask",
    [
        np.array([0, 2]),
        np.array([1, 0, 1]),
        np.array([True]),
        np.ones((3, 1), dtype=np.bool_),
    ],
    ids=["indices", "integers", "too short", "two axes"],
)
@pytest.mark.parametrize("everyone", [True, False], ids=["first reset", "later"])
def test_an_invalid_reset_mask_is_refused(
    make: Make, mask: Any, everyone: bool
) -> None:
    env = make(3, 2)
    if not everyone:
        env.reset(seed=0)
    with pytest.raises(ValueError, match=r"a bool array \[3\]"):
        env.reset(options={"reset_mask": mask})


def test_the_seed_reaches_gymnasiums_own_generator(make: Make) -> None:
    env = make(1, 2)
    env.reset(seed=7)
    assert env.np_random_seed == 7


def test_what_a_run_decides_is_set_by_name_and_the_rest_stays(make: Make) -> None:
    env = make(2, 2)
    before = (env.baseline, env.run_seed)
    env.configure()
    assert (env.baseline, env.run_seed) == before
    env.configure(run_seed=5)
    assert (env.baseline, env.run_seed) == (before[0], 5)
    env.configure(baseline=flat_baseline(2))
    assert env.prepare().baseline == flat_baseline(2)


@pytest.mark.parametrize("make", [trained, simulated], indirect=True)
def test_only_hosts_in_training_have_an_execution(make: Make) -> None:
    env = make(1, 1)
    if not isinstance(env, GrowthVectorEnv):
        assert env.execution is None
        return
    assert (env.execution.tier, env.execution.refused) == ("native", None)
