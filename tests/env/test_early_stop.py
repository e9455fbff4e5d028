"""Episodes that are cut short, as truncation: their rewards, observations, and the learning from them (L1)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from esper.agents.ppo.agent import PPOAgent
from esper.config import ConfigError, Durations, PPOConfig, TrainingConfig
from esper.core.stage import SeedStage as S
from esper.env.planted import PlantedVectorEnv
from esper.env.planted_law import SimParams
from esper.run.rollout import play_round
from esper.telemetry.event import EpisodeCompleted
from tests.core_helpers import (
    DAMAGE,
    rig,
    same_bits,
    tensors_of,
    tiny_config,
    wait_actions,
)

FROZEN: dict[str, Any] = {"task": {"learning_rate": 1e-30}}
"""Hosts that learn nothing: a plateau from the start."""
PLATEAU: dict[str, Any] = {
    "stop_on": ["plateau"],
    "plateau_epochs": 3,
    "plateau_margin": 0.5,
}


@pytest.mark.finding("L1")
def test_a_panic_cuts_the_episode_short_after_its_rollback() -> None:
    with rig(
        2, 8, env={"stop_on": ["divergence"]}, governor={"snapshot_every": 1}
    ) as world:
        world.step()
        good = tensors_of(world.training(1))
        DAMAGE["NaN weight"](world.training(1))
        world.step()
        assert world.truncated.tolist() == [False, True]
        assert world.terminated.tolist() == [False, False]
        assert world.info["idle"].tolist() == [False, False]  # both made this step
        assert world.info["reward_terms"]["governor"].tolist() == [0, -10]
        assert world.info["reward_terms"]["benefit"].tolist() == [
            0,
            0,
        ]  # V(s') stands for it
        same_bits(good, tensors_of(world.training(1)))
        (event,) = world.of_kind(EpisodeCompleted)
        assert (event.env, event.epochs, event.rollbacks) == (1, 2, 1)
        assert (event.terminated, event.stopped) == (False, "divergence")
        last = world.observation[1].copy()
        world.step()
        assert world.info["idle"].tolist() == [False, True]
        assert world.truncated.tolist() == [False, True]
        assert world.rewards[1] == 0
        assert np.array_equal(world.observation[1], last)
        assert world.env.state.epoch.tolist() == [3, 2]
        world.reset(options={"reset_mask": np.array([False, True])})
        assert world.info["idle"].tolist() == [False, False]
        world.step()
        assert world.truncated.tolist() == [False, False]
        assert world.env.state.epoch.tolist() == [4, 1]


@pytest.mark.finding("L1")
def test_true_ends_come_first() -> None:
    """A panic in the last epoch and the last rollback end the episode as without early stops."""
    with rig(1, 3, env={"stop_on": ["divergence", "plateau"]}) as world:
        world.step()
        world.step()
        DAMAGE["NaN weight"](world.training())
        world.step()
        assert (world.terminated.tolist(), world.truncated.tolist()) == (
            [True],
            [False],
        )
        assert world.of_kind(EpisodeCompleted)[0].stopped is None
    with rig(
        1, 5, env={"stop_on": ["divergence"]}, governor={"max_rollbacks": 1}
    ) as world:
        DAMAGE["NaN weight"](world.training())
        world.step()
        assert (world.terminated.tolist(), world.truncated.tolist()) == (
            [True],
            [False],
        )


@pytest.mark.finding("L1")
def test_a_plateau_cuts_the_episode_short() -> None:
    with rig(1, 8, env=PLATEAU, **FROZEN) as world:
        ends = []
        for _ in range(3):
            world.step()
            ends.append((world.terminated.tolist(), world.truncated.tolist()))
        assert ends == [([False], [False])] * 2 + [([False], [True])]
        (event,) = world.of_kind(EpisodeCompleted)
        assert (event.epochs, event.terminated, event.stopped) == (3, False, "plateau")
        # The baseline that it is compared with is that of the epoch it stopped in.
        assert event.baseline_accuracy == world.env.baseline.accuracy[3]  # type: ignore[union-attr]


@pytest.mark.finding("L1")
def test_a_host_with_a_living_seed_is_on_no_plateau() -> None:
    with rig(
        1, 12, env={**PLATEAU, "embargo": 1, "min_prune_age": 1}, **FROZEN
    ) as world:
        world.grow("r0c0", S.TRAINING, "norm")
        for _ in range(4):
            world.step()
            assert not world.truncated.any()
        world.do("PRUNE", "r0c0")
        while world.slot("r0c0").living:
            assert not world.truncated.any()
            world.step()
        assert world.truncated.tolist() == [True]


@pytest.mark.finding("L1")
def test_an_anomalous_loss_is_the_governors_to_judge_first() -> None:
    with rig(1, 9, env=PLATEAU, **FROZEN) as world:
        world.step()
        world.step()
        with torch.no_grad():
            world.training().host_group.parameters[-2].mul_(1e5)
        world.step()
        assert world.value("anomaly_pending") == 1
        assert not world.truncated.any()


@pytest.mark.parametrize(
    ("margin", "epochs"),
    [(20.0, 2), (19.0, 3), (1.0, 3), (0.9, 5), (0.5, 5), (0.4, None), (0.0, None)],
)
def test_a_plateau_is_seen_by_the_best_so_far(
    margin: float, epochs: int | None
) -> None:
    """Over the last two epochs the best accuracy rises by 20, 1, 1, 0.5 and 0.5; no episode ends before the second."""
    law = SimParams(
        noise=0.0, paired_noise=0.0, curve=(10.0, 30.0, 20.0, 31.0, 29.0, 31.5, 30.0)
    )
    limits = {"stop_on": ["plateau"], "plateau_epochs": 2, "plateau_margin": margin}
    env = PlantedVectorEnv(
        TrainingConfig.parse({"env": {"n_envs": 1, "episode_length": 6, **limits}}), law
    )
    env.reset(seed=0)
    while not env.done.all():
        _, _, terminated, truncated, _ = env.step(wait_actions(1))
    assert (terminated.tolist(), truncated.tolist()) == (
        [epochs is None],
        [epochs is not None],
    )
    assert env.state.epoch.tolist() == [epochs or 6]
    assert env.state.best_accuracy == max(law.curve[: (epochs or 6) + 1])  # type: ignore[index]


def test_the_plateau_scales_with_the_horizon_and_unknown_reasons_are_refused() -> None:
    assert [
        Durations.of(TrainingConfig(), t).plateau_epochs for t in (5, 15, 30, 150)
    ] == [3, 3, 6, 30]
    with pytest.raises(ConfigError, match=r"stop_on.*divergence.*plateau"):
        tiny_config(env={"stop_on": ["boredom"]})
    with pytest.raises(
        ConfigError, match=r"plateau_epochs.*greater than or equal to 1, not 0"
    ):
        tiny_config(env={"plateau_epochs": 0})


def planted(n_envs: int = 16, **sections: dict[str, Any]) -> PlantedVectorEnv:
    sections["env"] = {
        "n_envs": n_envs,
        "episode_length": 30,
        **sections.get("env", {}),
    }
    return PlantedVectorEnv(TrainingConfig.parse(sections))


@pytest.mark.finding("L1")
def test_the_agent_bootstraps_what_was_cut_short() -> None:
    """It bootstraps with its own value of the state in which each episode stopped."""
    env = planted(
        8,
        env={
            "stop_on": ["plateau"],
            "plateau_epochs": 3,
            "plateau_margin": 100.0,
            "max_seeds": 1,
        },
    )
    agent = PPOAgent(env.action_spec, env.layout, 8, PPOConfig(width=16), run_seed=1)
    seen: list[tuple[NDArray[np.bool_], NDArray[np.float32]]] = []
    record = agent.record

    def watch(*arguments: Any) -> None:
        record(*arguments)
        if arguments[3].any():
            seen.append(
                (
                    arguments[3] & ~arguments[4],
                    agent.value_of(arguments[6]).numpy().copy(),
                )
            )

    agent.record = watch  # type: ignore[method-assign]
    played = play_round(env, agent, seed=1, learner=agent)
    rollout, *_ = agent.buffer.stack()
    truncated, valid = rollout["truncated"].numpy(), rollout["valid"].numpy()
    lengths = valid.sum(axis=0)
    assert (lengths == played.epochs).all()
    assert truncated[-1].any()
    assert not truncated[-1].all()
    assert len(set(lengths)) > 2
    for e in np.flatnonzero(truncated[-1]):
        last = lengths[e] - 1
        assert not truncated[:last, e].any()
        (value,) = [values[e] for fresh, values in seen if fresh[e]]
        assert rollout["final_value"][last, e] == pytest.approx(value)
        assert value != 0
    stats = agent.update(played.observation)
    assert np.isfinite(stats.value_loss)
