"""Cases of `ppo-update`: the agent's update on one rollout, against RecurrentPPO of sb3-contrib on as much data.

Both sides have the same number of envs and steps, the same observation size, the same numbers of choices, one LSTM of
the same width for actor and critic, and the same number of passes and minibatches, advantages included, without early
stopping by KL divergence. A tiny learning rate keeps the policies unchanged, so that every turn does the same work.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
import torch

from esper.bench.request import BenchArgs, Size, SizeForm
from esper.bench.runner import BenchCase
from esper.bench.synthetic import flat_baseline
from esper.config import ConfigError, TrainingConfig
from esper.env.make import EnvMaker
from esper.env.slot_env import SlotVectorEnv
from esper.ppo.agent import PPOAgent
from esper.rollout.pretrain import practice_env
from esper.rollout.rollout import play_round
from esper.rollout.threads import one_thread

NAME = "ppo-update"
SIZE = SizeForm(("envs", "epochs"), "8x30")

DEFAULT_SIZES: tuple[Size, ...] = ((8, 30),)  # a round of the default run, on digits
STILL = 1e-8
"""A learning rate too small to change the policy."""
NEVER = 1e6
"""A KL divergence that is never reached."""


def comparisons(request: BenchArgs) -> Iterator[BenchCase]:
    """Yields the update at each size. Raises ConfigError if sb3-contrib is not installed."""
    for device in request.devices:
        for envs, steps in request.sizes or DEFAULT_SIZES:
            config = TrainingConfig.parse(
                {
                    "env": {"n_envs": envs, "episode_length": steps},
                    "ppo": {"learning_rate": STILL, "target_kl": NEVER, "practice_envs": envs, "device": str(device)},
                }
            )
            with one_thread():
                env = simulated(config)
                ours, theirs = own_update(env, config, device), sb3_update(env, config, device)
                yield BenchCase(
                    NAME,
                    f"E {envs}, {steps} steps, {config.ppo.update_epochs} x {config.ppo.n_minibatches} minibatches, "
                    f"LSTM {config.ppo.width}",
                    device,
                    "sb3-contrib RecurrentPPO.train",
                    ours,
                    theirs,
                    None,
                )
                env.close()


def simulated(config: TrainingConfig) -> SlotVectorEnv:
    """Returns simulated hosts with the slots, blueprints and observations of digits, so that no training is needed."""
    maker = EnvMaker.of(config)
    env = maker.make()
    env.baseline = flat_baseline(env.horizon)
    env.prepare()
    env.close()
    return practice_env(env, maker.config)


def own_update(env: SlotVectorEnv, config: TrainingConfig, device: torch.device) -> Callable[[], None]:
    """Returns a function in which the agent learns from one round, which it repeats at every call."""
    agent = PPOAgent(env.action_spec, env.layout, env.num_envs, config.ppo, device=device)
    played = play_round(env, agent, seed=0, learner=agent)
    rollout = {name: copy.copy(value) for name, value in agent.buffer.state_dict().items()}

    def update() -> None:
        agent.buffer.load_state_dict(rollout, agent.device)
        stats = agent.update(played.observation)
        assert not stats.stopped_early

    return update


class Still(gymnasium.Env[Any, Any]):
    """An env of random observations in the spaces of ``env``; episodes end at its horizon."""

    def __init__(self, env: SlotVectorEnv) -> None:
        self.observation_space = env.single_observation_space
        self.action_space = env.single_action_space
        self.horizon, self.steps = env.horizon, 0
        self.generator = np.random.default_rng(0)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.steps = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return self._observe(), float(self.generator.normal()), self.steps >= self.horizon, False, {}

    def _observe(self) -> Any:
        return self.generator.normal(size=self.observation_space.shape or ()).astype(np.float32)


def sb3_update(env: SlotVectorEnv, config: TrainingConfig, device: torch.device) -> Callable[[], None]:
    """Returns a function in which RecurrentPPO trains on one rollout. Raises ConfigError if it is not installed."""
    try:
        from sb3_contrib import RecurrentPPO
        from stable_baselines3.common.vec_env import DummyVecEnv
    except ImportError:
        raise ConfigError(
            'the baseline is sb3-contrib, which is not installed; to install: pip install -e ".[test]"'
        ) from None
    ppo, envs, steps = config.ppo, env.num_envs, env.horizon
    model = RecurrentPPO(
        "MlpLstmPolicy",
        DummyVecEnv([lambda: Still(env)] * envs),
        learning_rate=ppo.learning_rate,
        n_steps=steps,
        batch_size=envs * steps // min(ppo.n_minibatches, envs),
        n_epochs=ppo.update_epochs,
        gamma=ppo.gamma,
        gae_lambda=ppo.gae_lambda,
        clip_range=ppo.clip,
        ent_coef=ppo.entropy_start,
        vf_coef=ppo.value_coefficient,
        max_grad_norm=ppo.max_grad_norm,
        target_kl=None,
        seed=0,
        device=device,
        policy_kwargs={
            "net_arch": [ppo.width],
            "lstm_hidden_size": ppo.width,
            "shared_lstm": True,
            "enable_critic_lstm": False,
        },
    )
    _, callback = model._setup_learn(envs * steps)
    assert model.env is not None
    model.collect_rollouts(model.env, callback, model.rollout_buffer, steps)
    rollout, last = model.rollout_buffer, torch.zeros(envs, 1, device=device)

    def update() -> None:
        model.rollout_buffer = copy.copy(rollout)  # train() rearranges the buffer's fields
        model.rollout_buffer.compute_returns_and_advantage(last, np.ones(envs, dtype=np.bool_))
        model.train()

    return update
