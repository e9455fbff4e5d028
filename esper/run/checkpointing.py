"""Files that a run saves as it goes: its state and its best host."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from esper.config import RunConfig
from esper.env.slot_env import SlotVectorEnv
from esper.env.vector_env import GrowthVectorEnv
from esper.files import checkpoint
from esper.files.grown_host import committed_network, export
from esper.files.run_folder import RunFolder
from esper.run.interrupt import interrupts_wait
from esper.run.rollout import Round


class Checkpoints:
    """Saves the state of a run after its rounds and, within a long round, by the clock.

    Args:
        state: returns the state of the run, see ``checkpoint.KEYS``.
        last_is_intact: whether the newest checkpoint in the folder may be kept as the previous one.
    """

    def __init__(
        self,
        files: RunFolder,
        config: RunConfig,
        state: Callable[[], checkpoint.State],
        last_is_intact: bool,
    ) -> None:
        self.files = files
        self.config = config
        self.state = state
        self._last_is_intact = last_is_intact
        self._unwritten: bytes | None = None
        """An encoded state that is not on disk yet."""
        self._written_at = time.perf_counter()

    def save(self, finished: bool = False) -> None:
        """Writes the current state."""
        with interrupts_wait():
            self._encode(finished)
            self.write()

    def save_round(self, number: int) -> None:
        """Encodes the state after round ``number`` and writes it every ``run.checkpoint_every`` rounds."""
        self._encode()
        if number % self.config.checkpoint_every == 0:
            self.write()

    def save_by_the_clock(self) -> None:
        """Writes the state every ``run.checkpoint_minutes``, so that a kill does not lose a long round."""
        self.save_after(60 * self.config.checkpoint_minutes)

    def save_after(self, seconds: float) -> None:
        """Writes the state if that many seconds have passed since it was written last."""
        if time.perf_counter() - self._written_at > seconds:
            self.save()

    def write(self) -> None:
        """Writes the encoded state, if there is one that is not on disk yet."""
        with interrupts_wait():
            if self._unwritten is None:
                return
            self.files.write_checkpoint(self._unwritten, keep=self._last_is_intact)
            self._unwritten = None
            self._written_at = time.perf_counter()
            self._last_is_intact = True

    def _encode(self, finished: bool = False) -> None:
        state = {
            "config": checkpoint.config_digest(self.files.path),
            "logs": self.files.log_sizes(),
            "finished": finished,
            **self.state(),
        }
        self._unwritten = checkpoint.encode(state)


@dataclass(eq=False)
class BestHost:
    """Saves the host with the best committed validation accuracy so far, without regard to the test split."""

    folder: Path
    """The run folder."""
    env: SlotVectorEnv
    accuracy: float = -math.inf
    """That of the saved host, pp."""

    def offer(self, played: Round) -> None:
        """Saves the best host of the round if it is better than all before; simulated hosts are not saved."""
        committed = played.stats.committed
        winner = int(committed.argmax())
        if not isinstance(self.env, GrowthVectorEnv) or committed[winner] <= self.accuracy:
            return
        self.accuracy = float(committed[winner])
        training = self.env.host(winner)
        test = played.tests[0] if played.tests else self.env.test_accuracy()
        facts = {
            "env": winner,
            "episode": training.episode,
            "seed": self.env.config.run.seed,
            "validation_accuracy": self.accuracy,
            "test_accuracy": float(test[winner]),
        }
        export(committed_network(training), self.folder / "best_host", facts)
