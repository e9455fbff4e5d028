"""Memory of seeds that were removed serves the next of their kind, which is as fresh as in memory of its own."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from esper.core.blend import Seed
from esper.core.ramps import BlendOperator
from esper.core.stage import SeedStage
from esper.training.host_training import HostTraining
from esper.training.seed_pool import SeedPool
from esper.training.step import prepare_epoch
from tests.core_helpers import (
    make_training,
    plant,
    same_bits,
    tensors_of,
    tiny_config,
    train,
)

S = SeedStage


def seed_of(
    channels: int = 3, build: Callable[[int], nn.Module] = lambda c: nn.Conv2d(c, c, 1)
) -> Seed:
    return Seed(build(channels), BlendOperator.ADD, channels, "cnn")


def planted(
    training: HostTraining, slot: str = "r0c0", blueprint: str = "conv_light"
) -> tuple[Seed, Tensor]:
    made = plant(training, slot, blueprint)
    assert made.planted is not None
    return made.planted.module, made.planted.finite


def places(training: HostTraining, seed: Seed, slot: str = "r0c0") -> list[int]:
    """Addresses of the seed and its momentum."""
    group = training.seed_groups[slot]
    momenta = [group.optimizer.state[p]["momentum_buffer"] for p in group.parameters]
    return [
        tensor.data_ptr() for tensor in (*seed.parameters(), *seed.buffers(), *momenta)
    ]


def test_the_next_seed_of_a_kind_has_the_memory_of_the_last() -> None:
    training = make_training()
    seed, finite = planted(training)
    where, group = places(training, seed), training.seed_groups["r0c0"]
    train(training, 2)
    training.reset(0, 1)
    again, flag = planted(training)
    assert again is seed
    assert flag is finite
    assert training.seed_groups["r0c0"] is group
    assert places(training, again) == where


@pytest.mark.trap(15)
@pytest.mark.parametrize("blueprint", ["conv_light", "norm", "depthwise"])
def test_a_seed_in_used_memory_is_a_new_one_to_the_last_bit(blueprint: str) -> None:
    fresh, used = make_training(), make_training()
    slot = plant(used, "r0c0", blueprint)
    train(used, 2)
    assert slot.planted is not None
    slot.planted.finite.fill_(False)
    for training in (fresh, used):
        training.reset(3, 5)
        plant(training, "r0c0", blueprint)
        train(training, 2)
    same_bits(tensors_of(used, ("r0c0",)), tensors_of(fresh, ("r0c0",)))
    seed = used.site_by_name["r0c0"].planted
    assert seed is not None
    assert bool(seed.finite)


def test_another_slot_or_blueprint_has_memory_of_its_own() -> None:
    training = make_training()
    seeds = [planted(training, "r0c0")[0], planted(training, "r1c0")[0]]
    training.reset(0, 1)
    seeds += [planted(training, "r0c0", "norm")[0], planted(training, "r0c1")[0]]
    assert len({id(seed) for seed in seeds}) == 4


def test_a_seed_that_is_made_differently_does_not_take_the_memory() -> None:
    pool = SeedPool()
    first = pool.reuse(seed_of(), "kind")
    wider = pool.reuse(seed_of(4), "kind")
    assert wider is not first
    other = pool.reuse(seed_of(4, lambda c: nn.Sequential(nn.Conv2d(c, c, 1))), "kind")
    assert other is not wider
    cast = seed_of(4, lambda c: nn.Sequential(nn.Conv2d(c, c, 1))).double()
    assert pool.reuse(cast, "kind") is cast


def test_frozen_parameters_of_a_blueprint_stay_frozen_and_no_gradient_is_inherited() -> (
    None
):
    pool = SeedPool()
    first = pool.reuse(seed_of(), "kind")
    for parameter in first.parameters():
        parameter.requires_grad_(False)  # as a seed's are whose alpha falls
        parameter.grad = torch.ones_like(parameter)
    new = seed_of()
    bias = new.body.bias
    assert isinstance(bias, Tensor)
    bias.requires_grad_(False)
    again = pool.reuse(new, "kind")
    assert again is first
    assert [(p.requires_grad, p.grad) for p in again.parameters()] == [
        (True, None),
        (False, None),
    ]


def test_a_shadow_begins_in_the_same_memory_with_the_hosts_buffers_of_then() -> None:
    training = make_training()
    slot = plant(training, "r0c0")
    first = training.shadow_of(slot)
    train(training, 2)
    training.reset(0, 1)
    slot = plant(training, "r0c0")
    prepare_epoch(training)
    second = training.shadow_of(slot)
    assert second is first
    own = [buffer.clone() for buffer in training.host.buffers()]
    with second.in_place():
        assert all(
            torch.equal(mine, copy)
            for mine, copy in zip(own, training.host.buffers(), strict=True)
        )


def test_straight_through_needs_no_shadow() -> None:
    training = make_training(tiny_config(env={"incubation": "ste"}))
    plant(training, "r0c0")
    train(training)
    assert not training.shadows
    assert not training.pool.shadows
