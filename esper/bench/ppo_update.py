"""Cases of `ppo-update`: the agent's update on one rollout, against RecurrentPPO of sb3-contrib on as much data.

Both sides have the same number of envs and steps, the same observations and choices, one LSTM of the same width for
actor and critic, and the same number of passes and minibatches, advantages included, without early stopping by KL
divergence. A tiny learning rate keeps the policies unchanged, so that every turn does the same work.
"""

import copy
from collections.abc import Callable, Iterator

import numpy as np
import torch

from esper.agents.ppo.agent import PPOAgent
from esper.bench.case import BenchArgs, BenchCase, Sizes
from esper.bench.fixtures import flat_baseline
from esper.config import ConfigError, TrainingConfig
from esper.env.make import EnvMaker
from esper.env.planted import PlantedVectorEnv
from esper.env.single import SingleEnv
from esper.rollout.pretrain import practice_env
from esper.rollout.rollout import play_round
from esper.rollout.threads import one_thread

NAME = "ppo-update"
SIZES = Sizes("ENVSxEPOCHS", ((8, 30),), seconds=45.0)  # a round of the default run, on digits

STILL = 1e-8  # a learning rate too small to change the policy
NEVER = 1e6  # a KL divergence that is never reached


def comparisons(args: BenchArgs) -> Iterator[BenchCase]:
    """Yields the update at each size. Raises ConfigError if sb3-contrib is not installed."""
    for device, (envs, steps) in SIZES.of(args):
        config = TrainingConfig.parse(
            {
                "env": {"n_envs": envs, "episode_length": steps},
                "ppo": {
                    "learning_rate": STILL,
                    "target_kl": NEVER,
                    "practice_envs": envs,
                    "device": str(device),
                },
            }
        )
        with one_thread():
            env = simulated(config)
            ppo = config.ppo
            minibatches = f"{ppo.update_epochs} x {ppo.n_minibatches} minibatches"
            yield BenchCase(
                case=NAME,
                size=f"E {envs}, {steps} steps, {minibatches}, LSTM {ppo.width}",
                device=device,
                baseline="sb3-contrib RecurrentPPO.train",
                run=own_update(env, device),
                run_baseline=sb3_update(env, device),
            )


def simulated(config: TrainingConfig) -> PlantedVectorEnv:
    """Returns simulated hosts with the slots, blueprints and observations of digits, so that no training is needed."""
    maker = EnvMaker.of(config)
    env = maker.make()
    env.configure(baseline=flat_baseline(env.horizon))
    env.prepare()
    env.close()
    return practice_env(env, maker.config)


def own_update(env: PlantedVectorEnv, device: torch.device) -> Callable[[], None]:
    """Returns a function in which the agent learns from one round, which it repeats at every call."""
    agent = PPOAgent(
        env.action_spec,
        env.layout,
        env.num_envs,
        env.config.ppo,
        device=device,
    )
    played = play_round(env, agent, seed=0, learner=agent)
    rollout = {name: copy.copy(value) for name, value in agent.buffer.state_dict().items()}

    def update() -> None:
        agent.buffer.load_state_dict(rollout, agent.device)
        stats = agent.update(played.observation)
        assert not stats.stopped_early

    return update


def sb3_update(env: PlantedVectorEnv, device: torch.device) -> Callable[[], None]:
    """Returns a function in which RecurrentPPO trains on one rollout. Raises ConfigError if it is not installed."""
    try:
        from sb3_contrib import RecurrentPPO
        from stable_baselines3.common.vec_env import DummyVecEnv
    except ImportError:
        raise ConfigError(
            'the baseline is sb3-contrib, which is not installed; to install: pip install -e ".[test]"'
        ) from None
    ppo = env.config.ppo
    envs = env.num_envs
    steps = env.horizon
    network = {
        "net_arch": [ppo.width],
        "lstm_hidden_size": ppo.width,
        "shared_lstm": True,
        "enable_critic_lstm": False,
    }
    one_host = env.config.with_values(env={"n_envs": 1})
    theirs = DummyVecEnv([lambda: SingleEnv(PlantedVectorEnv(one_host, env.law), draws=True)] * envs)
    model = RecurrentPPO(
        "MlpLstmPolicy",
        theirs,
        learning_rate=ppo.learning_rate,
        n_steps=steps,
        batch_size=envs * steps // min(ppo.n_minibatches, envs),
        n_epochs=ppo.update_epochs,
        seed=0,
        device=device,
        policy_kwargs=network,
    )
    _, callback = model._setup_learn(envs * steps)
    model.collect_rollouts(theirs, callback, model.rollout_buffer, steps)
    rollout = model.rollout_buffer
    last = torch.zeros(envs, 1, device=device)  # values after the last step, at which all episodes end

    def update() -> None:
        model.rollout_buffer = copy.copy(rollout)  # train() rearranges the buffer's fields
        model.rollout_buffer.compute_returns_and_advantage(last, np.ones(envs, dtype=np.bool_))
        model.train()

    return update
