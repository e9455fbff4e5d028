"""Practice on simulated hosts that look like the real ones, each with its own worths."""

from typing import Any

import numpy as np
import pytest
import torch

from esper.agents.ppo.agent import PPOAgent
from esper.config import ConfigError, PPOConfig, TrainingConfig
from esper.env.make import EnvMaker
from esper.env.planted import PlantedVectorEnv
from esper.env.slot_env import SlotVectorEnv
from esper.run import pretrain as practice
from esper.run.pretrain import practice_env, practice_rounds, pretrain
from esper.run.rollout import EpisodeStats, play_round

N_ENVS = 16


@pytest.fixture(scope="module")
def real() -> tuple[SlotVectorEnv, TrainingConfig]:
    """Two digits hosts of eight epochs, prepared."""
    config = TrainingConfig.parse(
        {
            "task": {"samples_per_epoch": 128},
            "env": {"n_envs": 2, "episode_length": 8, "baseline_episodes": 2},
            "ppo": {
                "practice_steps": 2 * N_ENVS * 8,
                "practice_envs": N_ENVS,
                "practice_lengths": [1.0],
                "width": 16,
                "update_epochs": 1,
            },
        }
    )
    maker = EnvMaker.of(config)
    env = maker.make()
    env.prepare()
    return env, maker.config


def test_simulated_hosts_look_like_the_real_ones(
    real: tuple[SlotVectorEnv, TrainingConfig],
) -> None:
    env, config = real
    simulated = practice_env(env, config)
    assert simulated.action_spec == env.action_spec
    assert simulated.layout == env.layout
    assert (simulated.horizon, simulated.num_envs) == (8, N_ENVS)
    assert simulated.host_parameters == env.host_parameters == 277
    assert simulated.baseline is not None
    assert env.baseline is not None
    assert simulated.baseline.final_loss_std == pytest.approx(
        env.baseline.final_loss_std
    )
    _, info = simulated.reset(seed=0)
    assert env.rules is not None
    for _ in range(8):
        *_, info = simulated.step(np.zeros((N_ENVS, 8), dtype=np.int64))
    np.testing.assert_allclose(info["baseline_accuracy"], env.baseline.accuracy[-1])
    assert abs(info["committed_accuracy"].mean() - env.baseline.accuracy[-1]) < 1.0
    assert simulated.rules is not None
    own, real = simulated.choices, env.choices
    fits = real.parameters > 0
    mean = (real.parameters.sum(axis=0) / fits.sum(axis=0)).astype(int)
    np.testing.assert_array_equal(own.parameters, np.where(fits, mean, 0))
    np.testing.assert_array_equal(own.kinds, real.kinds)
    assert real.kinds.any()


def test_simulated_hosts_of_another_horizon_follow_the_same_curve(
    real: tuple[SlotVectorEnv, TrainingConfig],
) -> None:
    env, config = real
    assert env.baseline is not None
    curve = env.baseline.accuracy
    for horizon, shorter, same in (
        (4, slice(None), slice(None, None, 2)),
        (16, slice(None, None, 2), slice(None)),
    ):
        simulated = practice_env(env, config, horizon)
        assert (simulated.horizon, simulated.num_envs) == (horizon, N_ENVS)
        assert simulated.baseline is not None
        np.testing.assert_allclose(simulated.baseline.accuracy[shorter], curve[same])


def test_episodes_of_several_lengths_are_practised_in_turn_until_the_steps_are_used_up() -> (
    None
):
    def rounds(steps: int, *lengths: float) -> list[int]:
        settings = {"practice_steps": steps, "practice_envs": 2}
        return practice_rounds(
            PPOConfig(**settings, **({"practice_lengths": lengths} if lengths else {})),
            horizon=30,
        )

    assert rounds(2 * 2 * (12 + 21 + 30 + 60)) == [12, 21, 30, 60] * 2
    assert rounds(2 * (12 + 21 + 30 + 60 + 12 + 21) - 1) == [12, 21, 30, 60, 12]
    assert rounds(1) == [12]
    assert rounds(200, 1.0) == [30, 30, 30]
    assert rounds(200, 1.0, 1.01) == [
        30,
        30,
        30,
    ]  # the same number of epochs is one length
    assert rounds(4, 0.001) == [1, 1]


@pytest.mark.parametrize(
    "lengths", [[], [0.0], [1.0, -1.0], [10.5], [float("nan")], 1.0]
)
def test_impossible_lengths_of_practice_are_refused(lengths: object) -> None:
    with pytest.raises(ConfigError, match=r"ppo\.practice_lengths"):
        TrainingConfig.parse({"ppo": {"practice_lengths": lengths}})


def test_hosts_of_each_length_have_draws_of_their_own(
    real: tuple[SlotVectorEnv, TrainingConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    env, config = real
    worths: dict[int, list[np.ndarray]] = {}

    def played(
        simulated: PlantedVectorEnv, agent: PPOAgent, **rest: Any
    ) -> EpisodeStats:
        found = play_round(simulated, agent, **rest)
        worths.setdefault(simulated.horizon, []).append(simulated.backend.worth.copy())
        return found

    monkeypatch.setattr(practice, "play_round", played)
    pretrain(
        env,
        config.with_values(
            ppo={"practice_lengths": (0.5, 1.0), "practice_steps": N_ENVS * 2 * (4 + 8)}
        ),
        lambda *_: None,
    )
    assert {horizon: len(rounds) for horizon, rounds in worths.items()} == {4: 2, 8: 2}
    assert (worths[4][0] != worths[8][0]).all()


def test_practice_is_repeatable_and_touches_no_generator_of_the_process(
    real: tuple[SlotVectorEnv, TrainingConfig],
) -> None:
    env, config = real
    before = torch.get_rng_state()
    reports: list[tuple[int, int, float]] = []
    agents = [
        pretrain(env, config, lambda *report: reports.append(report)) for _ in range(2)
    ]
    assert torch.equal(before, torch.get_rng_state())
    assert [report[:2] for report in reports] == [(1, 2), (2, 2)] * 2
    assert reports[:2] == reports[2:]
    assert all(
        torch.equal(a, b)
        for a, b in zip(*(agent.parameters for agent in agents), strict=True)
    )


@pytest.mark.slow
def test_an_heir_acts_as_the_one_that_practised(
    real: tuple[SlotVectorEnv, TrainingConfig],
) -> None:
    env, config = real
    practised = pretrain(env, config, lambda *_: None)
    heir = PPOAgent(env.action_spec, env.layout, 2, config.ppo, run_seed=9)
    heir.load_from(practised)
    assert heir.rewards.scale == practised.rewards.scale
    played = [
        play_round(env, agent.clone_policy(2, 5, greedy=True), 5)
        for agent in (practised, heir)
    ]
    np.testing.assert_array_equal(played[0].returns, played[1].returns)


@pytest.mark.slow
def test_practice_teaches_what_pays_on_simulated_hosts_that_were_not_practised_on() -> (
    None
):
    maker = EnvMaker.of(
        TrainingConfig.parse({"env": {"n_envs": 2}, "ppo": {"practice_steps": 200_000}})
    )
    env = maker.make()
    env.prepare()
    exam = practice_env(env, maker.config)
    fresh = PPOAgent(exam.action_spec, exam.layout, exam.num_envs, maker.config.ppo)
    practised = pretrain(env, maker.config, lambda *_: None)
    before, after = (
        float(
            play_round(
                exam, agent.clone_policy(N_ENVS, 999, greedy=False), 999
            ).returns.mean()
        )
        for agent in (fresh, practised)
    )
    print(f"return {before:.3f} before, {after:.3f} after")
    assert after > before + 0.3
