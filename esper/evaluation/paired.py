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
    """Results of one arm, one value per host in the order of the pairs; test accuracies of committed networks in pp."""

    controller: str
    accuracy: Floats
    parameters: Floats
    fossils: Floats


@dataclass(frozen=True)
class ArmComparison:
    """An arm against the reference; its p value is corrected for all comparisons made together (Holm)."""

    pair: PairedComparison
    adjusted_p: float

    @property
    def verdict(self) -> str:
        return self.pair.verdict(p_value=self.adjusted_p)

    @property
    def words(self) -> str:
        """The difference with its interval and the verdict, for one line of a table."""
        pair = self.pair
        low, high = pair.interval.low, pair.interval.high
        interval = f"95 % interval {low:+.2f} to {high:+.2f}" if pair.pairs > 1 else "no interval"
        return f"{pair.difference:+6.2f} pp, {interval}: {self.verdict_word}"

    @property
    def verdict_word(self) -> str:
        """Short verdict on the first arm, for a table that also shows the numbers."""
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
    """Plays ``controllers``, given by name, on ``pairs`` hosts with the same initial weights and the same batches.

    The hosts are the held-out hosts of ``run.seed``, the same ones that an agent's run with that seed ends with.

    Args:
        config: config of all arms.
        progress: called after each arm's round.
        task: what hosts are trained on; None: the task named in ``config``.

    Raises:
        ConfigError: a controller is unknown or repeated, or the config cannot run.
    """
    if len(set(controllers)) < len(controllers):
        raise ConfigError(f"a controller is given twice: {', '.join(controllers)}")
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
    """Lets every player grow the hosts of ``run_seed``: pair i is the same (env, episode) for each of them.

    The arms of a round are played in random order, so that a change in the machine's speed affects all of them.

    Args:
        baseline: the no-growth baseline; None: that of the config's run seed, measured once.
        played: results by player and round. Rounds found here are not played again; each new one is stored here before
            ``progress`` is called.
    """
    # Each side below gets the fewest envs that play the pairs in this number of rounds, so that few hosts are surplus.
    rounds = -(-pairs // maker.config.env.n_envs)
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
    """Compares every other arm with the reference arm (other minus reference)."""
    base = next(arm for arm in arms if arm.controller == reference)
    return corrected([_pair(arm, base) for arm in arms if arm is not base])


def against_each(arms: Sequence[Arm], ours: str) -> list[ArmComparison]:
    """Compares one arm with each of the others (``ours`` minus other)."""
    own = next(arm for arm in arms if arm.controller == ours)
    return corrected([_pair(own, arm) for arm in arms if arm is not own])


def corrected(found: Sequence[PairedComparison]) -> list[ArmComparison]:
    """Returns the comparisons with p values corrected for their number (Holm)."""
    adjusted = holm_adjusted([pair.p_value for pair in found])
    return [ArmComparison(pair, p) for pair, p in zip(found, adjusted, strict=True)]


def _pair(a: Arm, b: Arm) -> PairedComparison:
    return compare_pairs(a.accuracy, b.accuracy, name_a=a.controller, name_b=b.controller)
