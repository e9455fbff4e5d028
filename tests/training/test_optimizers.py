"""The optimizers of host and seeds: where their state lies, and whose it is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import esper
from esper.data.host_checks import check_hosts
from esper.env.vector_env import GrowthVectorEnv
from esper.lifecycle.stage import SeedStage as S
from esper.ops import SGD
from esper.training.host_training import HostTraining
from esper.training.step import begin_epoch
from tests.core_helpers import digits, plant, tiny_config, train
from tests.hosts.test_users_models import Plain, X, task_of
from tests.training.byte_images import byte_digits
from tests.training.test_foreign_hosts import training_of


def momenta(env: HostTraining) -> list[torch.Tensor]:
    state = env.host_group.optimizer.state
    return [state[parameter]["momentum_buffer"] for parameter in env.host_group.parameters]


@pytest.mark.parametrize("task", [digits, byte_digits])
def test_momentum_is_there_from_the_start_in_the_layout_of_the_weights(task: object) -> None:
    env = training_of(task())  # type: ignore[operator]
    plant(env, "r0c0", "conv_heavy", stage=S.TRAINING)
    for group in (env.host_group, env.seed_groups["r0c0"]):
        assert set(group.optimizer.state) == set(group.parameters)
        for parameter in group.parameters:
            buffer = group.optimizer.state[parameter]["momentum_buffer"]
            assert buffer.stride() == parameter.stride()
            assert not bool(buffer.any())
    if task is byte_digits:
        assert any(buffer.dim() == 4 and buffer.stride()[1] == 1 for buffer in momenta(env))
    places = [buffer.data_ptr() for buffer in momenta(env)]
    train(env, 2)
    assert [buffer.data_ptr() for buffer in momenta(env)] == places  # a captured step finds it there
    assert all(bool(buffer.any()) for buffer in momenta(env))


@pytest.mark.parametrize("task", [digits, byte_digits])
def test_a_reset_zeroes_momentum_where_it_lies(task: object) -> None:
    env = training_of(task())  # type: ignore[operator]
    optimizer, places = env.host_group.optimizer, [buffer.data_ptr() for buffer in momenta(env)]
    train(env)
    env.reset(0, 1)
    assert env.host_group.optimizer is optimizer
    assert [buffer.data_ptr() for buffer in momenta(env)] == places
    assert not any(bool(buffer.any()) for buffer in momenta(env))


@pytest.mark.trap(40)
def test_host_and_seeds_read_one_rate_on_the_device() -> None:
    env = training_of(digits())
    plant(env, "r0c0")
    plant(env, "r1c1", stage=S.HOLDING)
    groups = [env.host_group, *env.seed_groups.values()]
    assert len(groups) == 3
    for group in groups:
        assert isinstance(group.optimizer, SGD)
        (options,) = group.optimizer.param_groups
        assert options["lr"] is env.rate
    begin_epoch(env)
    assert float(env.rate) == pytest.approx(0.05)
    train(env, 3)
    assert 0 < float(env.rate) < 0.05


@pytest.mark.trap(15)
def test_a_seed_starts_with_momentum_of_its_own() -> None:
    env = training_of(digits())
    slot = plant(env, "r0c0", stage=S.HOLDING)
    train(env, 2)
    assert all(state["momentum_buffer"].any() for state in env.seed_groups["r0c0"].optimizer.state.values())
    env.remove(slot)
    plant(env, "r0c0")
    again = env.seed_groups["r0c0"].optimizer
    assert not any(bool(state["momentum_buffer"].any()) for state in again.state.values())


# What cannot be trained is refused before any work is done


class Complex(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.zeros(8, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last((self.first(x) * self.phase.exp()).real)  # type: ignore[no-any-return]


def half() -> nn.Module:
    return Plain().half()


def test_parameters_in_float16_are_refused_with_what_to_do() -> None:
    task = task_of(half, "first", x=X.half())
    words = r"mine: model.first.weight is torch.float16; .* torch.float32, torch.bfloat16, torch.float64\. For passes"
    with pytest.raises(esper.ConfigError, match=words):
        check_hosts(task)
    with pytest.raises(esper.ConfigError, match=words):
        GrowthVectorEnv(task, tiny_config(task={"samples_per_epoch": 32, "batch_size": 16}))


def test_complex_parameters_are_refused() -> None:
    with pytest.raises(esper.ConfigError, match=r"model.phase is torch.complex64"):
        check_hosts(task_of(Complex, "first"))


def test_parameters_that_are_not_trained_may_be_of_any_kind() -> None:
    def frozen() -> nn.Module:
        model = Complex()
        model.phase.requires_grad_(False)
        return model

    task = task_of(frozen, "first")
    env = training_of(task, task={"samples_per_epoch": 32, "batch_size": 16})
    assert check_hosts(task).parameter_count == env.host_parameters
    before = env.host.get_parameter("model.phase").clone()
    train(env)
    assert torch.equal(before, env.host.get_parameter("model.phase"))
