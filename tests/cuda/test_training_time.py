"""A GPU's time for training is in the phase "train", and measuring it adds no wait."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from esper.config import TrainingConfig
from esper.env.make import make_env
from esper.env.vector_env import GrowthVectorEnv
from esper.training.host_trainer import HostTrainer
from esper.training.host_training import HostTraining
from tests.core_helpers import wait_actions

pytestmark = pytest.mark.cuda


def test_the_phase_of_training_lasts_as_long_as_the_gpu_trains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The GPU is busy for a while after everything is queued. Its own events within the phase are the reference."""
    inner, elapsed = HostTrainer.epoch, list[float]()
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def epoch(trainer: HostTrainer, active: Sequence[HostTraining]) -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            began.record()
            torch.cuda._sleep(500_000_000)
            inner(trainer, active)
            ended.record()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    config = TrainingConfig.parse(
        {
            "run": {"device": "cuda", "tier": "eager"},
            "task": {"samples_per_epoch": 128},
            "env": {"n_envs": 2, "episode_length": 6, "baseline_episodes": 1},
        }
    )
    training = make_env(config)
    assert isinstance(training, GrowthVectorEnv)
    try:
        training.reset(seed=0)
        training.step(wait_actions(2))  # kernels are loaded
        monkeypatch.setattr(HostTrainer, "epoch", epoch)
        for _ in range(3):
            before = training.phase_seconds
            training.step(wait_actions(2))
            spent = {
                name: now - before[name] for name, now in training.phase_seconds.items()
            }
            elapsed.append(began.elapsed_time(ended) / 1000)
            assert spent["train"] > 0.99 * elapsed[-1]
            assert spent["validate"] >= 0.0
    finally:
        training.close()
