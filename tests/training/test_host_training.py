"""Operations that torch does not have are not requested."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch

from esper.agents.make import make_controller
from esper.config import TrainingConfig
from esper.config.task import Freeze
from esper.core.stage import SeedStage as S
from esper.data.tasks import build_host
from esper.env.make import EnvMaker
from esper.env.vector_env import GrowthVectorEnv
from esper.training.host_training import freeze
from tests.core_helpers import plant, train
from tests.training.byte_images import byte_digits
from tests.training.test_foreign_hosts import training_of


@pytest.mark.parametrize("incubation", ["shadow", "ste"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_norm_seed_is_incubated_in_a_host_whose_features_are_in_channels_last(
    precision: str, incubation: str
) -> None:
    training = training_of(
        byte_digits(), task={"precision": precision}, env={"incubation": incubation}
    )
    born = [
        plant(training, slot.name, "norm", stage=S.TRAINING) for slot in training.sites
    ]
    before = [
        [p.detach().clone() for p in slot.seed.parameters()]
        for slot in born
        if slot.seed
    ]
    train(training)
    for slot, old in zip(born, before, strict=True):
        assert slot.planted is not None
        assert bool(slot.planted.finite)
        assert all(
            not torch.equal(a, b)
            for a, b in zip(old, slot.planted.module.parameters(), strict=True)
        )


def changed_by_growing(which: Freeze, tmp_path: Path) -> tuple[set[str], int]:
    """Names of the host's tensors that an episode of growth changes, and the number of seeds that it keeps."""
    sections = {
        "task": {"freeze": which, "samples_per_epoch": 256},
        "env": {"n_envs": 1, "episode_length": 5, "baseline_episodes": 1},
    }
    env = EnvMaker.of(TrainingConfig.parse(sections)).make()
    assert isinstance(env, GrowthVectorEnv)
    with closing(env):
        observation, info = env.reset(seed=1)
        host = env.training[0].host
        before = {name: value.clone() for name, value in host.state_dict().items()}
        controller = make_controller(
            "heuristic", "digits", env.action_spec, env.layout, 1, 1, env.config
        )
        controller.begin()
        while not env.done.all():
            observation, *_, info = env.step(
                controller.act(observation, info["action_mask"])
            )
        after = host.state_dict()
        kept = int(env.state.slots.fossil.sum())
    return {
        name for name, value in before.items() if not torch.equal(value, after[name])
    }, kept


def test_a_frozen_host_keeps_its_bits_while_seeds_learn(tmp_path: Path) -> None:
    changed, kept = changed_by_growing("host", tmp_path)
    assert not changed
    assert kept > 0


def test_of_a_frozen_body_only_the_head_learns(tmp_path: Path) -> None:
    changed, _ = changed_by_growing("body", tmp_path)
    assert changed == {"segments.3.2.weight", "segments.3.2.bias"}


@pytest.mark.parametrize("task", ["chars", "digits_table", "mnist5k"])
def test_the_head_is_the_last_layer_with_parameters(task: str) -> None:
    host = build_host(task)
    freeze(host, "body")
    learning = [
        name for name, parameter in host.named_parameters() if parameter.requires_grad
    ]
    assert learning == [name for name, _ in host.named_parameters()][-2:]
