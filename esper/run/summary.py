"""What a run ends with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from esper.evaluation.paired import ArmComparison
from esper.stats.paired import PairedComparison
from esper.telemetry.event import Comparison


@dataclass(frozen=True)
class RunSummary:
    """What a run ends with; accuracies are those of committed networks on the test split, pp."""

    folder: Path
    controller: str
    comparisons: tuple[ArmComparison, ...]
    """The run's controller against each baseline, hosts left alone (``none``) first. Empty where an agent was
    interrupted before it had learned."""
    host_parameters: int
    grown_parameters: float
    """Mean over the compared hosts."""
    fossils: float
    """Mean over the compared hosts."""
    rounds: int
    total_rounds: int
    interrupted: bool
    seconds: float
    dropped_sinks: dict[str, str]

    @property
    def comparison(self) -> PairedComparison:
        """Against the hosts left alone. Raises ValueError where nothing was compared."""
        if not self.comparisons:
            raise ValueError("nothing was compared: the agent was interrupted while it learned")
        return self.comparisons[0].pair


def as_reported(found: ArmComparison) -> Comparison:
    """A comparison as the run's last event has it."""
    pair = found.pair
    return Comparison(
        reference=pair.name_b,
        accuracy=pair.mean_a,
        reference_accuracy=pair.mean_b,
        difference=pair.difference,
        low=pair.interval.low,
        high=pair.interval.high,
        p_value=found.adjusted_p,
        verdict=found.verdict,
    )
