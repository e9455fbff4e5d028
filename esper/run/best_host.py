"""The best host of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from esper.env.slot_env import SlotVectorEnv
from esper.env.vector_env import GrowthVectorEnv
from esper.files.grown_host import committed_network, export
from esper.rollout.collector import Round


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
