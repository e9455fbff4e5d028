"""Hosts on two GPUs."""

import os

import pytest
import torch
from torch import Tensor

from esper.agents.controller import RandomController
from esper.config import TrainingConfig
from esper.env.make import make_env
from tests.core_helpers import EASY_GATES

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.filterwarnings("ignore:.*deterministic.*:UserWarning"),
]

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as in test_gpu_streams


@pytest.mark.finding("T1")
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_hosts_on_two_gpus_have_the_bits_of_one() -> None:
    """Five hosts that take two GPUs in turn, in a course of random actions, beside the same on one."""
    torch.backends.cudnn.deterministic = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    sizes = {
        "n_envs": 5,
        "episode_length": 8,
        "gates": EASY_GATES,
        "embargo": 1,
        "baseline_episodes": 2,
    }
    seen: list[list[Tensor]] = []
    for device in ("cuda:0", "cuda:0,cuda:1"):
        config = TrainingConfig.parse(
            {
                "run": {"device": device},
                "task": {"samples_per_epoch": 256},
                "env": sizes,
            }
        )
        env = make_env(config)
        chance = RandomController(env.action_spec, env.layout, 5, 3)
        observation, info = env.reset(seed=4)
        chance.begin()
        seen.append([torch.from_numpy(observation)])
        for _ in range(8):
            observation, rewards, _, _, info = env.step(
                chance.act(observation, info["action_mask"])
            )
            seen[-1] += [torch.from_numpy(observation), torch.from_numpy(rewards)]
        env.close()
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False
    for one, two in zip(*seen, strict=True):
        assert torch.equal(one, two)
