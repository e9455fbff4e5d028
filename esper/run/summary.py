"""The summary returned at the end of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from esper.compare.analysis import ArmComparison
from esper.compare.statistics import PairedComparison
from esper.telemetry.score import ACCURACY, ScoreUnit


@dataclass(frozen=True)
class RunSummary:
    """Result of a run; accuracies are those of committed networks on the test split, in pp."""

    folder: Path
    controller: str
    comparisons: tuple[ArmComparison, ...]
    """The run's controller against each baseline, hosts left alone (``none``) first. Empty if an agent was interrupted
    before it finished learning, or the run was stopped in its first round."""
    host_parameters: int
    grown_parameters: float
    """Mean number of parameters of the compared hosts."""
    fossils: float
    """Mean number of fossils of the compared hosts."""
    rounds: int
    total_rounds: int
    interrupted: bool
    seconds: float
    dropped_sinks: dict[str, str]
    score: ScoreUnit = ACCURACY
    """Display format of the score of hosts; ``comparisons`` have it in percentage points."""

    @property
    def comparison(self) -> PairedComparison:
        """The comparison with hosts left alone. Raises ValueError if nothing was compared."""
        if not self.comparisons:
            raise ValueError("nothing was compared: the run was interrupted before there was a result")
        return self.comparisons[0].pair
