"""Random play: legal and illegal actions, broken seeds, several episodes, and invariants after every step."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from numpy.typing import NDArray

from esper.core.action import Op
from esper.core.stage import LIVING, ON, TRANSITIONS, SeedStage
from esper.data.split import Split
from esper.data.task import Task
from esper.env.vector_env import GrowthVectorEnv
from esper.telemetry.event import (
    ActionTaken,
    Event,
    GateEvaluated,
    GovernorRollback,
    SeedCut,
    StageChanged,
)
from tests.core_helpers import (
    SlotView,
    digits,
    flat_baseline,
    same_bits,
    tensors_of,
    tiny_config,
    wait_actions,
)

S = SeedStage
HORIZON, MAX_SEEDS, MAX_FOSSILS = 24, 2, 3
BY_ACTION = {"germinate", "advance", "fossilize", "prune", "set_alpha_target"}


@cache
def small_task() -> Task:
    """Sixteen samples an epoch, judged on forty: an epoch takes a few milliseconds."""
    validation = digits().validation
    return replace(digits(), validation=Split(validation.x[:40], validation.y[:40]))


class Lives(RuleBasedStateMachine):
    """One env under random actions, and its twin that never plants anything."""

    @initialize(
        automatic=st.sampled_from([[], ["G1"], ["G1", "G2", "G3"]]),
        embargo=st.integers(1, 3),
        mode=st.sampled_from(["shaped", "loss_shaped"]),
        seed=st.integers(0, 5),
    )
    def start(self, automatic: list[str], embargo: int, mode: str, seed: int) -> None:
        self.embargo = embargo
        config = tiny_config(
            horizon=HORIZON,
            task={"samples_per_epoch": 16, "batch_size": 16},
            env={
                "embargo": embargo,
                "auto_advance": automatic,
                "max_seeds": MAX_SEEDS,
                "max_fossils": MAX_FOSSILS,
                "one_incubating": False,
                "max_training_epochs": 6,
                "min_prune_age": 1,
                "baseline_episodes": 2,
            },
            reward={"mode": mode},
        )
        self.events: list[Event] = []
        self.env, self.twin = (
            GrowthVectorEnv(small_task(), config, emit, baseline=flat_baseline(HORIZON))
            for emit in (self.events.append, lambda _event: None)
        )
        self.env.run_seed = self.twin.run_seed = seed
        self.begin()

    def begin(self) -> None:
        """The next episode of both."""
        self.events.clear()
        self.observation, self.info = self.env.reset()
        self.twin.reset()
        self.alone = True
        self.broken: set[str] = set()
        self.known = {slot.name: S.DORMANT for slot in self.training.sites}
        self.pruned_at: dict[str, int] = {}
        self.done = False

    @property
    def training(self) -> Any:
        return self.env.training[0]

    @property
    def slots(self) -> list[SlotView]:
        return [SlotView(self.env, name) for name in self.env.action_spec.slots]

    @property
    def mask(self) -> dict[str, NDArray[np.bool_]]:
        return {name: table[0] for name, table in self.info["action_mask"].items()}

    def legal_pairs(self, *ops: Op) -> list[tuple[int, int]]:
        return [
            (op, slot)
            for op, slot in zip(*np.nonzero(self.mask["op_slot"]), strict=True)
            if Op(op) in ops
        ]

    def complete(
        self, pair: tuple[int, int], heads: tuple[int, ...], draw: int
    ) -> NDArray[np.int64]:
        """A legal action with this op and slot."""
        affordable = np.flatnonzero(self.mask["slot_blueprint"][pair[1]])
        blueprint = affordable[draw % len(affordable)] if len(affordable) else 0
        return np.array([*pair, blueprint, *heads], dtype=np.int64)

    HEADS = st.tuples(*(st.integers(0, size - 1) for size in (4, 3, 3, 4, 5)))
    """style, tempo, alpha target, alpha speed, alpha curve"""

    @precondition(lambda self: not self.done)
    @rule(heads=HEADS, draw=st.integers(0, 99))
    def carry_on(self, heads: tuple[int, ...], draw: int) -> None:
        """An action that advances a seed, if one is legal."""
        pairs = self.legal_pairs(Op.ADVANCE, Op.FOSSILIZE) or self.legal_pairs(
            Op.GERMINATE
        )
        row = (
            self.complete(pairs[draw % len(pairs)], heads, draw)
            if pairs
            else wait_actions(1)[0]
        )
        self.step(row)

    @precondition(lambda self: not self.done)
    @rule(heads=HEADS, draw=st.integers(0, 9999))
    def act(self, heads: tuple[int, ...], draw: int) -> None:
        """Any legal action but WAIT, if there is one."""
        pairs = self.legal_pairs(*(op for op in Op if op is not Op.WAIT))
        row = (
            self.complete(pairs[draw % len(pairs)], heads, draw // 7)
            if pairs
            else wait_actions(1)[0]
        )
        self.step(row)

    @precondition(lambda self: not self.done)
    @rule(draw=st.integers(0, 2**31))
    def say_anything(self, draw: int) -> None:
        """Random entries in range, which are mostly illegal."""
        self.step(np.random.default_rng(draw).integers(self.env.action_spec.sizes))

    @precondition(lambda self: not self.done)
    @rule(epochs=st.integers(1, 3))
    def wait(self, epochs: int) -> None:
        for _ in range(epochs):
            if not self.done:
                self.step(wait_actions(1)[0])

    @precondition(
        lambda self: (
            not self.done and any(slot.seed is not None for slot in self.training.sites)
        )
    )
    @rule(draw=st.integers(0, 3))
    def break_a_seed(self, draw: int) -> None:
        grown = [slot for slot in self.training.sites if slot.seed is not None]
        slot = grown[draw % len(grown)]
        with torch.no_grad():
            list(slot.seed.parameters())[-1].fill_(float("nan"))
        self.broken.add(slot.name)
        self.step(wait_actions(1)[0])

    @precondition(lambda self: self.done)
    @rule()
    def next_episode(self) -> None:
        self.begin()

    def step(self, row: NDArray[np.int64]) -> None:
        legal = bool(self.env.mask.legal(0, row))
        counted, epoch = int(self.info["illegal_actions"][0]), self.training.epoch
        self.events.clear()
        self.observation, rewards, terminated, truncated, self.info = self.env.step(
            row[None]
        )
        assert self.training.epoch == epoch + 1
        assert self.info["illegal_actions"][0] == counted + (not legal)
        self.done = bool(terminated[0])
        rolled_back = self.check_rollback()
        self.check_action(row, legal)
        self.check_stages()
        self.check_owners()
        self.check_slots()
        self.check_numbers(float(rewards[0]), rolled_back)
        self.check_twin(rolled_back)
        governor = self.env.backend.hosts[0].governor
        assert not truncated[0]
        assert self.done == (self.training.epoch == HORIZON or governor.rollbacks == 3)

    def of(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def check_rollback(self) -> bool:
        """A broken fossil costs a rollback, a broken living seed that takes part is cut."""
        trained = {
            slot: stage
            for slot, stage in self.stage_in_training().items()
            if slot in self.broken
        }
        fossils = [slot for slot, stage in trained.items() if stage is S.FOSSILIZED]
        seeds = {
            slot
            for slot, stage in trained.items()
            if stage in (S.TRAINING, S.BLENDING, S.HOLDING)
        }
        rollbacks, cuts = (
            self.of(GovernorRollback),
            {event.slot for event in self.of(SeedCut)},
        )
        assert len(rollbacks) == bool(fossils)
        assert cuts == (set() if fossils else seeds)
        self.broken -= {*fossils, *seeds}
        if rollbacks:
            self.broken.clear()
        return bool(rollbacks)

    def stage_in_training(self) -> dict[str, SeedStage]:
        """Each slot's stage in the epoch just trained: the stage before the step, after the action."""
        stages = dict(self.known)
        for event in self.of(StageChanged):
            if event.cause in BY_ACTION:
                stages[event.slot] = S[event.after]
        return stages

    def check_action(self, row: NDArray[np.int64], legal: bool) -> None:
        """An action that the mask allows is accepted, or refused by a gate; any other is not tried."""
        taken = self.of(ActionTaken)
        caused = [event for event in self.of(StageChanged) if event.cause in BY_ACTION]
        if not legal or row[0] == Op.WAIT:
            assert not taken
            assert not caused
            return
        (action,) = taken
        name = self.env.action_spec.slots[row[1]]
        assert (action.op, action.slot) == (Op(int(row[0])).name, name)
        assert all(event.slot == name for event in caused)
        gates = [event for event in self.of(GateEvaluated) if event.slot == name]
        if not action.accepted:
            assert action.reason
            assert not caused
            assert not gates[0].passed
            assert any(not held for _, held, _, _ in gates[0].checks)
        elif Op(int(row[0])) in (Op.GERMINATE, Op.ADVANCE, Op.FOSSILIZE):
            assert len(caused) == 1
            assert gates[0].passed

    def check_stages(self) -> None:
        """Every change is in the table and starts where the last one ended, and cooldowns have the right length."""
        after_prune = {
            S.EMBARGOED: 1,
            S.RESETTING: 1 + self.embargo,
            S.DORMANT: 2 + self.embargo,
        }
        for event in self.of(StageChanged):
            before, after = S[event.before], S[event.after]
            assert before is self.known[event.slot]
            revoked = (before, after, event.cause) == (
                S.FOSSILIZED,
                S.PRUNED,
                "rollback",
            )
            assert revoked or after in TRANSITIONS[before]
            self.known[event.slot] = after
            if after is S.PRUNED:
                self.pruned_at[event.slot] = event.epoch
                self.broken.discard(event.slot)
            elif after in after_prune:
                assert event.epoch == self.pruned_at[event.slot] + after_prune[after]
        assert self.known == {slot.name: slot.stage for slot in self.slots}

    def check_owners(self) -> None:
        """Every parameter is in exactly one optimizer, and removed seeds have none."""
        training = self.training
        groups = [training.host_group, *training.seed_groups.values()]
        owned = [
            id(p)
            for group in groups
            for options in group.optimizer.param_groups
            for p in options["params"]
        ]
        modules = [
            training.host,
            *(site.seed for site in training.sites if site.seed is not None),
        ]
        assert sorted(owned) == sorted(
            id(p) for module in modules for p in module.parameters()
        )
        assert len(set(owned)) == len(owned)
        assert set(training.seed_groups) == {
            site.name for site in training.sites if site.seed is not None
        }
        for group in groups:
            assert set(group.optimizer.state) == set(group.parameters)
            assert group.site is None or group is training.seed_groups[group.site.name]
        assert set(training.shadows) <= {
            site.name for site in training.sites if site.incubating
        }

    def check_slots(self) -> None:
        slots = self.slots
        assert sum(slot.stage in LIVING for slot in slots) <= MAX_SEEDS
        assert (
            sum(slot.stage in {*LIVING, S.FOSSILIZED} for slot in slots) <= MAX_FOSSILS
        )
        for slot in slots:
            low, high = sorted((slot.alpha_start, slot.alpha_target))
            assert 0 <= low <= slot.alpha <= high <= 1
            assert (slot.seed is not None) == (slot.stage in {*LIVING, S.FOSSILIZED})
            if slot.stage in (S.HOLDING, S.FOSSILIZED):
                assert slot.alpha == 1
            elif slot.stage not in ON:
                assert slot.alpha == 0
            if slot.seed is not None:
                assert 0 <= slot.epochs_in_stage <= slot.age <= self.training.epoch

    def check_numbers(self, reward: float, rolled_back: bool) -> None:
        assert self.env.single_observation_space.contains(self.observation[0])
        assert np.isfinite(self.observation).all()
        terms = {
            name: float(values[0]) for name, values in self.info["reward_terms"].items()
        }
        assert all(math.isfinite(value) for value in terms.values())
        assert reward == pytest.approx(sum(terms.values()), abs=1e-12)
        assert terms["governor"] == (-10 if rolled_back else 0)
        fossils = tuple(self.training.fossils())
        for name, tensor in tensors_of(self.training, fossils).items():
            assert bool(torch.isfinite(tensor).all()), name

    def check_twin(self, rolled_back: bool) -> None:
        """Until a seed is blended or a snapshot restored, the host has the bits of one left alone."""
        blended = any(
            stage in ON
            for stage in {*self.known.values(), *self.stage_in_training().values()}
        )
        self.alone &= not (blended or rolled_back)
        if self.alone:
            self.twin.step(wait_actions(1))
            same_bits(tensors_of(self.twin.training[0]), tensors_of(self.training))

    def teardown(self) -> None:
        if hasattr(self, "env"):
            self.env.close()
            self.twin.close()


TestLives = pytest.mark.slow(Lives.TestCase)
TestLives.settings = settings(
    max_examples=3,
    stateful_step_count=40,
    deadline=None,
    phases=(
        Phase.explicit,
        Phase.reuse,
        Phase.generate,
    ),  # shrinking an example of trained hosts takes minutes
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.filter_too_much,
    ],
)
