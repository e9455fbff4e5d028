"""A host that goes bad in an env: its rollback, its penalty, and the other hosts, which do not change."""

from typing import Any

import numpy as np
import pytest
import torch

from esper.telemetry.event import EpisodeCompleted
from tests.core_helpers import DAMAGE, Rig, rig, same_bits, tensors_of

EVERY_EPOCH = {"snapshot_every": 1}
break_host = DAMAGE["NaN weight"]


@pytest.mark.trap(3)
def test_a_panic_in_the_last_epoch_is_punished_too() -> None:
    with rig(horizon=3) as world:
        world.step()
        world.step()
        break_host(world.training())
        world.step()
        assert world.terminated.tolist() == [True]
        assert world.info["reward_terms"]["governor"][0] == -10


@pytest.mark.trap(2)
def test_a_broken_host_never_shows_in_the_observation() -> None:
    """The observation shows the restored state, not clipped values of the broken host."""
    seen = ("validation_loss", "validation_accuracy")
    with rig(n_envs=2, horizon=6, governor=EVERY_EPOCH) as world:
        for step in range(4):
            before = [world.value(name) for name in seen]
            broken = step in (1, 3)
            if broken:
                DAMAGE["infinite weight" if step == 3 else "NaN weight"](
                    world.training()
                )
            world.step()
            assert ([world.value(name) for name in seen] == before) == broken
            assert np.isfinite(world.observation).all()
            assert all(space.contains(row) for space, row in _pairs(world))
            assert np.isfinite(world.rewards).all()


def _pairs(world: Rig) -> list[tuple[Any, Any]]:
    return [(world.env.single_observation_space, row) for row in world.observation]


def test_three_rollbacks_end_the_episode_as_terminated_and_the_env_idles() -> None:
    with rig(n_envs=2, horizon=9) as world:
        ended = []
        for _ in range(3):
            break_host(world.training(1))
            world.step()
            ended.append(world.terminated.tolist())
        assert ended == [[False, False], [False, False], [False, True]]
        assert world.truncated.tolist() == [False, False]
        assert world.info["reward_terms"]["governor"].tolist() == [0, -10]
        assert (
            world.info["reward_terms"]["benefit"][1] != 0
        )  # paid at termination, at whatever epoch
        (event,) = world.of_kind(EpisodeCompleted)
        assert (event.env, event.epochs, event.rollbacks, event.terminated) == (
            1,
            3,
            3,
            True,
        )
        still, weights = world.observation[1].copy(), tensors_of(world.training(1))
        world.do("GERMINATE", "r0c0", "norm", env=1)
        assert world.terminated.tolist() == [False, True]
        assert world.rewards[1] == 0
        assert world.info["idle"].tolist() == [False, True]
        assert np.array_equal(world.observation[1], still)
        same_bits(weights, tensors_of(world.training(1)))
        assert world.training(0).epoch == 4


def test_clocks_schedules_and_generators_do_not_rewind() -> None:
    with rig(horizon=8) as healthy, rig(horizon=8) as hurt:
        for world in (healthy, hurt):
            world.step()
            world.step()
        break_host(hurt.training())
        for world in (healthy, hurt):
            world.step()
        assert hurt.training().epoch == 3
        assert torch.equal(
            healthy.training().order.get_state(), hurt.training().order.get_state()
        )
        for world in (healthy, hurt):
            world.step()
        rates = [
            w.training().host_group.optimizer.param_groups[0]["lr"]
            for w in (healthy, hurt)
        ]
        assert rates[0] == rates[1]
