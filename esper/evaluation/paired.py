"""Controllers compared on the same hosts: paired seeds, arms interleaved in random order, test accuracy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esper.config import ConfigError, TrainingConfig
from esper.data.task import Task
from esper.env.baseline import Baseline
from esper.env.make import EnvMaker
from esper.evaluation.arm_runner import HELD_OUT, GrowingSide, HostResult, MakePlayer, play_rounds
from esper.files.system_info import check_devices
from esper.rollout.policies import make_player
from esper.rollout.threads import one_thread
from esper.stats.paired import MIN_PAIRS, PairedComparison, compare_pairs, holm_adjusted
from esper.telemetry.event import ArmPlayed

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Arm:
    """One arm's hosts in order of their pairs; accuracies pp, test split, committed networks."""

    controller: str
    accuracy: Floats
    parameters: Floats
    fossils: Floats


@dataclass(frozen=True)
class ArmComparison:
    """An arm against the reference, with its p value corrected for all comparisons made together (Holm)."""

    pair: PairedComparison
    adjusted_p: float

    @property
    def verdict(self) -> str:
        return self.pair.verdict(p_value=self.adjusted_p)

    @property
    def words(self) -> str:
        """The difference with its interval and the verdict, for a line of a table."""
        pair = self.pair
        low, high = pair.interval.low, pair.interval.high
        interval = f"95 % interval {low:+.2f} to {high:+.2f}" if pair.pairs > 1 else "no interval"
        return f"{pair.difference:+6.2f} pp, {interval}: {self.verdict_word}"

    @property
    def verdict_word(self) -> str:
        """The verdict on the first arm, for a table that has the numbers beside it."""
        pair = self.pair
        if pair.pairs < MIN_PAIRS:
            return f"inconclusive, fewer than {MIN_PAIRS} pairs"
        winner = pair.winner(p_value=self.adjusted_p)
        if winner is None:
            return "no evidence of a difference"
        return "better" if winner == pair.name_a else "worse"


def _ignore(_event: ArmPlayed) -> None:
    pass


def compare_controllers(
    config: TrainingConfig,
    controllers: Sequence[str],
    pairs: int = 10,
    progress: Callable[[ArmPlayed], None] = _ignore,
    task: Task | None = None,
) -> list[Arm]:
    """Play ``controllers``, by their names, on ``pairs`` hosts that start from the same weights and see the same
    batches; ``progress`` hears of each arm's round.

    They are the held-out hosts of ``run.seed``, those that a run of an agent with that seed ends on; of ``task`` where
    it is given, else of the one that ``config`` names.

    Raises:
        ConfigError: unknown or repeated controllers, or a config that cannot run.
    """
    if len(set(controllers)) < len(controllers):
        raise ConfigError(f"an arm is named twice: {', '.join(controllers)}")
    check_devices(config.run.device)
    maker = EnvMaker.of(config, task)

    seed = config.run.seed + HELD_OUT

    def player(name: str) -> MakePlayer:
        return lambda env: make_player(name, maker.config, env, seed)

    return play_arms(maker, {name: player(name) for name in controllers}, pairs, seed, progress)


@one_thread()
def play_arms(
    maker: EnvMaker,
    players: Mapping[str, MakePlayer],
    pairs: int,
    run_seed: int,
    progress: Callable[[ArmPlayed], None],
    baseline: Baseline | None = None,
    played: dict[str, dict[int, list[HostResult]]] | None = None,
) -> list[Arm]:
    """Let every player grow the hosts of ``run_seed``: pair i is the same (env, episode) for each of them.

    The no-growth baseline is that of the config's run seed, measured once unless it is given. The arms of a round are
    played in random order, so that a change of the machine meets all of them. What is in ``played``, by player and
    round, is not played again; what is played is put there before ``progress`` hears of it.
    """
    # As few envs as play the pairs in as many rounds, so that little is played beyond them.
    rounds = -(-pairs // (maker.config.env.n_envs or 1))
    sides: dict[str, GrowingSide] = {}
    if played is None:
        played = {name: {} for name in players}
    baselines: dict[Any, Baseline] = {}
    try:
        for name, make in players.items():
            sides[name] = GrowingSide(maker, make, -(-pairs // rounds), run_seed, baselines, count=False)
        for side in sides.values():
            side.env.baseline = side.env.baseline or baseline
            side.prepare()
        order = np.random.default_rng([run_seed, len(players)])
        play_rounds(sides, rounds, order, played, lambda _name, _number, _hosts: None, progress)
    finally:
        for side in sides.values():
            side.close()
    return [
        _arm(name, [host for _, hosts in sorted(played[name].items()) for host in hosts][:pairs]) for name in players
    ]


def _arm(name: str, hosts: Sequence[HostResult]) -> Arm:
    columns = [[host.accuracy for host in hosts], [host.parameters for host in hosts], [host.fossils for host in hosts]]
    return Arm(name, *(np.array(column) for column in columns))


def against_reference(arms: Sequence[Arm], reference: str) -> list[ArmComparison]:
    """Every other arm minus the reference arm."""
    base = next(arm for arm in arms if arm.controller == reference)
    return corrected([_pair(arm, base) for arm in arms if arm is not base])


def against_each(arms: Sequence[Arm], ours: str) -> list[ArmComparison]:
    """One arm minus each of the others."""
    own = next(arm for arm in arms if arm.controller == ours)
    return corrected([_pair(own, arm) for arm in arms if arm is not own])


def corrected(found: Sequence[PairedComparison]) -> list[ArmComparison]:
    """The comparisons with their p values corrected for their number."""
    adjusted = holm_adjusted([pair.p_value for pair in found])
    return [ArmComparison(pair, p) for pair, p in zip(found, adjusted, strict=True)]


def _pair(a: Arm, b: Arm) -> PairedComparison:
    return compare_pairs(a.accuracy, b.accuracy, name_a=a.controller, name_b=b.controller)
