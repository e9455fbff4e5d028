"""The best return of the planted task, found by a search over schedules under the law without noise.

Without noise an env is deterministic, so a schedule is one action per epoch, int64 [T, 8], and its return is played,
not estimated. The search has two parts:

1. Order, blueprints and pace. Every order of every subset of the slots, with every choice of blueprints of positive
   worth there, is tried at several paces (incubation and tempo); each seed is planted as soon as the one before it has
   left incubation. In the law, seeds hardly interact (a small synergy, the concave rent) and do better the earlier they
   are planted, so the optimum is near one of these schedules.
2. Polishing. The best schedules are improved until no single edit helps. An edit changes a head of an action, moves an
   action to a free epoch, swaps two, removes or inserts one, or shifts all later actions by an epoch.

So the result is at least as good as all orders and choices, and no single edit improves it: it is near-optimal and
exactly reproducible. Returns are discounted by the reward's γ, because only then do the potential terms of an episode
cancel exactly. In an undiscounted sum they leave (γ − 1) · ΣΦ, a penalty on holding seeds that is unrelated to the
outcome.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, permutations, product

import numpy as np
from numpy.typing import NDArray

from esper.config import TrainingConfig
from esper.core.action import HEADS, RELEVANT, TEMPOS, ActionSpec, Op
from esper.core.slots import Floats
from esper.env.planted import PlantedVectorEnv
from esper.env.planted_law import SimParams

Schedule = NDArray[np.int64]
"""One action per epoch, [T, 8]."""

BATCH = 2048
"""Number of schedules played together."""
KEPT = 2
"""Number of schedules that are polished."""


@dataclass(frozen=True)
class Best:
    """The best schedule found."""

    schedule: Schedule
    discounted: float
    """Σ γ^t r_t."""


def play(
    schedules: NDArray[np.int64], config: TrainingConfig, law: SimParams | None = None
) -> Floats:
    """Plays schedules [N, T, 8] under the law without noise and returns their discounted returns [N].

    An illegal action is executed as WAIT.
    """
    quiet = replace(law or SimParams(), noise=0.0, paired_noise=0.0)
    returns: list[Floats] = []
    for start in range(0, len(schedules), BATCH):
        part = schedules[start : start + BATCH]
        env = PlantedVectorEnv(config.with_values(env={"n_envs": len(part)}), quiet)
        env.reset(seed=0)
        total, discount = np.zeros(len(part)), 1.0
        for epoch in range(env.horizon):
            total += discount * env.step(part[:, epoch])[1]
            discount *= config.reward.gamma
        returns.append(total)
    return np.concatenate(returns)


def best_return(
    config: TrainingConfig | None = None, law: SimParams | None = None
) -> Best:
    """Searches for the best schedule and its discounted return in the config's reward mode."""
    env = PlantedVectorEnv(config, law)
    config, law = env.config, env.law
    candidates = np.array(list(_planned(env)))
    returns = play(candidates, config, law)
    leaders = candidates[np.argsort(-returns, kind="stable")[:KEPT]]
    return max(
        (_polish(schedule, env) for schedule in leaders),
        key=lambda best: best.discounted,
    )


def edits(schedule: Schedule, spec: ActionSpec) -> Iterator[Schedule]:
    """Yields every schedule that differs by one edit."""
    taken = np.flatnonzero(schedule[:, 0] != Op.WAIT)
    free = np.flatnonzero(schedule[:, 0] == Op.WAIT)
    for epoch in taken.tolist():
        action = schedule[epoch]
        yield _with(schedule, {epoch: 0})
        for head in RELEVANT[Op(action[0])]:
            place = HEADS.index(head)
            for value in range(spec.sizes[place]):
                if value != action[place]:
                    changed = action.copy()
                    changed[place] = value
                    yield _with(schedule, {epoch: changed})
        for other in free.tolist():
            yield _with(schedule, {epoch: 0, other: action})
        for other in taken[taken > epoch].tolist():
            yield _with(schedule, {epoch: schedule[other], other: action})
    for epoch in free.tolist():
        # All later actions move one epoch earlier.
        yield np.concatenate(
            (
                schedule[:epoch],
                schedule[epoch + 1 :],
                np.zeros((1, len(HEADS)), dtype=np.int64),
            )
        )
        for action in _insertions(spec):
            yield _with(schedule, {epoch: action})
    for epoch in range(len(schedule) - 1):
        yield np.concatenate(
            (
                schedule[:epoch],
                np.zeros((1, len(HEADS)), dtype=np.int64),
                schedule[epoch:-1],
            )
        )


def _insertions(spec: ActionSpec) -> Iterator[NDArray[np.int64]]:
    """Yields an action of each op for each slot (and blueprint), with the usually best values of the other heads."""
    for slot in spec.slots:
        yield from (
            spec.encode(Op.GERMINATE, slot, name, tempo=TEMPOS[0])
            for name in spec.blueprints
        )
        yield from (
            spec.encode(op, slot)
            for op in (Op.ADVANCE, Op.FOSSILIZE, Op.PRUNE, Op.SET_ALPHA_TARGET)
        )


def _with(schedule: Schedule, actions: dict[int, NDArray[np.int64] | int]) -> Schedule:
    changed = schedule.copy()
    for epoch, action in actions.items():
        changed[epoch] = action
    return changed


def _polish(schedule: Schedule, env: PlantedVectorEnv) -> Best:
    """Applies the best single edit as long as one improves the return."""
    value = float(play(schedule[None], env.config, env.law)[0])
    while True:
        neighbours = np.array(list(edits(schedule, env.action_spec)))
        returns = play(neighbours, env.config, env.law)
        winner = int(returns.argmax())
        if returns[winner] <= value + 1e-12:
            return Best(schedule, value)
        schedule, value = neighbours[winner], float(returns[winner])


def _planned(env: PlantedVectorEnv) -> Iterator[Schedule]:
    """Yields schedules for every order of every subset of slots and every useful choice of blueprints and pace."""
    law, least = env.law, env.config.durations.min_training_epochs
    useful = [[b for b, worth in enumerate(row) if worth > 0] for row in law.worth]
    for count in range(len(law.slots) + 1):
        for chosen in combinations(range(len(law.slots)), count):
            for order, choice in product(
                permutations(chosen), product(*(useful[slot] for slot in chosen))
            ):
                blueprint = dict(zip(chosen, choice, strict=True))
                seeds = [(slot, blueprint[slot]) for slot in order]
                for incubation, tempo in product(
                    range(least, least + 5), range(len(TEMPOS))
                ):
                    yield _as_soon_as_possible(seeds, incubation, tempo, env)


def _as_soon_as_possible(
    seeds: list[tuple[int, int]], incubation: int, tempo: int, env: PlantedVectorEnv
) -> Schedule:
    """Plants, incubates, blends, holds and fossilizes each seed; the next is planted when this one starts to blend.

    ``seeds`` are (slot, blueprint) indices, ``tempo`` is an index into ``TEMPOS``, ``incubation`` is in epochs.
    """
    schedule = np.zeros((env.horizon, len(HEADS)), dtype=np.int64)
    start = 0

    def put(epoch: int, op: Op, slot: int, blueprint: int = 0) -> int:
        """Schedules an action in the first free epoch from ``epoch`` on, if within the horizon; returns the epoch."""
        while epoch < env.horizon and schedule[epoch, 0] != Op.WAIT:
            epoch += 1
        if epoch < env.horizon:
            schedule[epoch, :3] = op, slot, blueprint
            if op is Op.GERMINATE:
                schedule[epoch, HEADS.index("tempo")] = tempo
                schedule[epoch, HEADS.index("alpha_target")] = env.action_spec.choices(
                    "alpha_target"
                ).index(1.0)
        return epoch

    for slot, blueprint in seeds:
        planted = put(start, Op.GERMINATE, slot, blueprint)
        incubated = put(planted + 1, Op.ADVANCE, slot)
        blended = put(incubated + incubation, Op.ADVANCE, slot)
        # The ramp takes one step on entering BLENDING and one in each tick.
        held = put(blended + TEMPOS[tempo] - 1, Op.ADVANCE, slot)
        put(held + 1, Op.FOSSILIZE, slot)
        start = blended + 1
    return schedule
