"""The seeds that were tried on one host, and how each ended."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from esper.telemetry.event import ActionTaken, EpochCompleted, Event, HostEvent, StageChanged
from esper.telemetry.score import ACCURACY, ScoreUnit
from esper.telemetry.text import count

GONE = frozenset({"DORMANT", "PRUNED", "EMBARGOED", "RESETTING"})
"""Stages of a slot whose seed was removed."""
CAUSES = {
    "prune": "pruned by the controller",
    "faded": "pruned by the controller, after its alpha had faded to 0",
    "rollback": "lost when the governor restored the host",
    "not finite": "removed because a value was not finite",
    "stuck in training": "removed because gate G2 did not open in time",
}


@dataclass(frozen=True)
class TriedSeed:
    """One seed, from its germination on. Epochs are those trained before; contributions are in pp of the score."""

    slot: str
    blueprint: str
    planted: int
    """Epoch of its germination."""
    stage: str
    """Stage at the end, or when it was removed; FOSSILIZED if it was kept."""
    until: int
    """Epoch at which it was kept, removed or last seen."""
    removed: str = ""
    """The reason that it was removed; empty if it was not."""
    contribution: float | None = None
    """Accuracy with all seeds minus accuracy without this one, when last measured; None if never.

    It is how much the grown host leans on the seed. What keeping the seed won is known only beside the same host alone.
    """
    contribution_error: float | None = None
    """Paired standard error of the contribution."""
    refusals: int = 0
    """Number of times that a gate refused to let it pass."""
    refusal: str = ""
    """The gate's last reason."""
    standing: str = ""
    """The reason that it had not passed on when the host ended; empty if it was kept or removed."""

    @property
    def kept(self) -> bool:
        return self.stage == "FOSSILIZED"

    @property
    def end(self) -> str:
        """Its fate, and the reason that it was not kept."""
        if self.kept:
            return f"kept at epoch {self.until}"
        if not self.removed:
            return f"in {self.stage} at the end: {self.standing}" if self.standing else f"in {self.stage} at the end"
        refused = f"; a gate refused it {count(self.refusals, 'time')}, last: {self.refusal}" if self.refusals else ""
        return f"{self.removed} at epoch {self.until}, in {self.stage}{refused}"

    def __str__(self) -> str:
        return self.words(ACCURACY)

    def words(self, score: ScoreUnit) -> str:
        """Describes the seed, with its contribution in the unit of the score."""
        worth = "" if self.contribution is None else f", contribution {score.difference(self.contribution)}"
        error = "" if self.contribution_error is None else score.value(self.contribution_error, unit=False)
        error = f" (standard error {error})" if error else ""
        return f"{self.slot} {self.blueprint}: planted at epoch {self.planted}, {self.end}{worth}{error}"


@dataclass
class SeedsTried:
    """Folds the events of one host's episode, in order, into its seeds."""

    seeds: list[TriedSeed] = field(default_factory=list)
    """In order of germination."""
    _at: dict[str, int] = field(default_factory=dict)
    """Index of the newest seed of each slot."""

    def handle(self, event: Event) -> None:
        if not isinstance(event, HostEvent):
            return
        match event:
            case StageChanged(blueprint=str() as blueprint):
                self._changed(event, blueprint)
            case ActionTaken(accepted=False, slot=str() as slot) if event.op != "GERMINATE" and slot in self._at:
                seed = self.seeds[self._at[slot]]
                self._put(slot, refusals=seed.refusals + 1, refusal=event.reason)
            case EpochCompleted():
                for slot, contribution in event.contributions.items():
                    error = event.contribution_errors.get(slot)
                    self._put(slot, contribution=contribution, contribution_error=error)
                for slot, stage in event.stages.items():
                    if slot in self._at and stage not in GONE and stage != "FOSSILIZED":
                        self._put(slot, until=event.epoch)

    def stand(self, slot: str, why: str) -> None:
        """Notes what keeps the living seed of ``slot`` from passing on."""
        self._put(slot, standing=why)

    def _changed(self, event: StageChanged, blueprint: str) -> None:
        slot = event.slot
        if event.after in GONE:
            if event.before not in GONE:
                cause = CAUSES.get(event.cause, event.cause)
                self._put(slot, stage=event.before, until=event.epoch, removed=cause)
        elif event.before in GONE:
            self._at[slot] = len(self.seeds)
            self.seeds.append(TriedSeed(slot, blueprint, event.epoch, event.after, event.epoch))
        else:
            self._put(slot, stage=event.after, until=event.epoch)

    def _put(self, slot: str, **values: object) -> None:
        if slot in self._at:
            at = self._at[slot]
            self.seeds[at] = replace(self.seeds[at], **values)  # type: ignore[arg-type]
