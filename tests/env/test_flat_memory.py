"""Rounds and changes of topology leave nothing behind: storage, tensors and bytes stay the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import Tensor

from esper.agents.controller import RandomController
from esper.core.action import Op
from esper.core.stage import SeedStage
from esper.data.split import Split
from esper.env.vector_env import GrowthVectorEnv
from esper.telemetry.event import Event, StageChanged
from esper.training.host_training import HostTraining
from esper.training.seed_pool import SeedPool
from esper.training.shadow import ShadowBuffers
from tests.core_helpers import digits, flat_baseline, rig, tiny_config, wait_actions
from tests.training.live_tensors import STATM, Live, live_tensors, resident_mib

HORIZON = 12


def storage_of(training: HostTraining) -> dict[str, int]:
    """Addresses of the host's parameters, buffers and momentum."""
    found: dict[str, Tensor] = dict(training.host.named_parameters())
    found |= dict(training.host.named_buffers())
    state = training.host_group.optimizer.state
    found |= {
        f"momentum.{i}": state[p]["momentum_buffer"]
        for i, p in enumerate(training.host_group.parameters)
    }
    return {name: tensor.data_ptr() for name, tensor in found.items()} | {
        "row": training.totals.training.data_ptr()
    }


@pytest.mark.finding("M20")
def test_reset_fills_the_storage_of_the_host_before() -> None:
    with rig(n_envs=2, horizon=3) as world:
        places = [storage_of(world.training(i)) for i in range(2)]
        hosts = [id(world.training(i).host) for i in range(2)]
        assert len(places[0]) > 20
        weights = set()
        for _ in range(5):
            world.reset()
            world.do("GERMINATE", "r0c0", "norm", tempo=3)
            world.step()
            world.step()
            assert [storage_of(world.training(i)) for i in range(2)] == places
            assert [id(world.training(i).host) for i in range(2)] == hosts
            weights.add(
                float(next(world.training().host.parameters()).detach().flatten()[0])
            )
        assert len(weights) == 5  # other values, each time, in the same place


class Changing:
    """Two tiny hosts under random legal actions, episode after episode."""

    def __init__(self) -> None:
        validation = digits().validation
        task = replace(digits(), validation=Split(validation.x[:40], validation.y[:40]))
        config = tiny_config(
            2,
            HORIZON,
            task={"samples_per_epoch": 16, "batch_size": 16},
            env={
                "embargo": 1,
                "one_incubating": False,
                "min_prune_age": 1,
                "auto_advance": ["G1", "G2", "G3"],
            },
            governor={"snapshot_every": 1},
        )
        self.stages: dict[str, int] = {}
        self.env = GrowthVectorEnv(
            task, config, emit=self.count, baseline=flat_baseline(HORIZON)
        )
        for training in self.env.training:
            training.pool = SeedPool(max_kinds=0)  # removed seeds keep nothing
            for slot in (
                training.sites
            ):  # what is kept of each slot is made before anything is counted
                training.pool.shadows[slot.name] = ShadowBuffers(training.host)
        self.player = RandomController(self.env.action_spec, self.env.layout, 2)

    def count(self, event: Event) -> None:
        """A change of topology: a seed that appears, becomes part of the host, or disappears."""
        if isinstance(event, StageChanged) and event.after in (
            "GERMINATED",
            "FOSSILIZED",
            "PRUNED",
        ):
            self.stages[event.after] = self.stages.get(event.after, 0) + 1

    @property
    def changes(self) -> int:
        return sum(self.stages.values())

    def until(self, changes: int) -> Live:
        """Plays episodes up to this number of changes; returns the live tensors after one without actions."""
        while self.changes < changes:
            observation, info = self.env.reset()
            self.player.begin()
            while not info["idle"].all():
                if (
                    self.env.state.episode[0] % 2
                ):  # otherwise pruning leaves hardly any fossil
                    info["action_mask"]["op"][:, Op.PRUNE] = False
                actions = self.player.act(observation, info["action_mask"])
                observation, _, terminated, truncated, info = self.env.step(actions)
                info["idle"] = terminated | truncated
        self.env.reset()
        for _ in range(HORIZON):
            self.env.step(wait_actions(2))
        return live_tensors()


@pytest.mark.slow
def test_changes_of_topology_leave_nothing_behind() -> None:
    """After the first hundred changes, no tensor and at most 4 MiB are added."""
    if not STATM.exists():
        pytest.skip("resident memory is read from /proc")
    world = Changing()
    try:
        first = world.until(100)
        before = resident_mib()
        assert world.until(1000) == first
        assert set(world.stages) == {"GERMINATED", "FOSSILIZED", "PRUNED"}
        assert (world.env.state.slots.stage == SeedStage.DORMANT).all()
        assert resident_mib() - before < 4.0
    finally:
        world.env.close()
