"""The history of one host's seeds, folded from its events: the stages of every slot, and how each seed ended."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from esper.telemetry.event import CAUSES, ActionTaken, EpochCompleted, Event, GovernorRollback, StageChanged
from esper.telemetry.score import ACCURACY, ScoreUnit
from esper.telemetry.text import count, times, with_unit


@dataclass(slots=True)
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
    cause: str | None = None
    """Cause of its removal, as in StageChanged; None if it was not removed."""
    contribution: float | None = None
    """Accuracy with all seeds minus accuracy without this one, when last measured; None if never.

    It is how much the grown host leans on the seed. What keeping the seed won is known only beside the same host alone.
    """
    contribution_error: float | None = None
    """Paired standard error of the contribution."""
    contribution_kept: float | None = None
    """Contribution when it was kept."""
    refusals: int = 0
    """Number of times that a gate refused to let it pass."""
    refusal: str = ""
    """The gate's last reason."""
    standing: str = ""
    """The reason that it had not passed on when the host ended; empty if it was kept or removed."""
    blended: bool = False
    """Whether it was ever blended into the host."""
    parameters: int | None = None
    """Its number of parameters; known if it was kept."""
    merged: int | None = None
    """Epoch at which it became a part of the host's layers; None if it did not."""
    released: int | None = None
    """Epoch from which its units were taken out of these layers again; None if they were not."""
    trial: float | None = None
    """Accuracy with it at its target alpha minus accuracy without it, before it was blended in; None if unknown."""
    units: tuple[int, int] | None = None
    """Units of its layer before and with it, if it is a widening and they are known."""
    path: str = ""
    """Where the slot lies in the network, by names of its modules; empty if they are not known."""

    @property
    def name(self) -> str:
        """Its blueprint and its place, and of a widening the units."""
        place = f"{self.path} ({self.slot})" if self.path else self.slot
        words = f"{self.blueprint} in {place}"
        if self.units is not None:
            before, after = self.units
            words += f", {before:,} -> {after:,} units"
        return words

    @property
    def kept(self) -> bool:
        return self.stage == "FOSSILIZED" and self.cause is None

    @property
    def removed(self) -> str:
        """The reason that it was removed; empty if it was not."""
        return "" if self.cause is None else CAUSES.get(self.cause, self.cause)

    @property
    def end(self) -> str:
        """Its fate, and the reason that it was not kept."""
        if self.kept:
            words = f"kept at epoch {self.until}"
            if self.merged is not None:
                words += f", merged at epoch {self.merged}"
            return words
        if self.released is not None:
            return f"merged at epoch {self.merged}, taken out of its layer from epoch {self.released} on"
        if not self.removed:
            words = f"in {self.stage} at the end"
            if self.standing:
                words += f": {self.standing}"
            return words
        words = f"{self.removed} at epoch {self.until}, in {self.stage}"
        if self.refusals:
            words += f"; a gate refused it {count(self.refusals, 'time')}, last: {self.refusal}"
        return words

    def __str__(self) -> str:
        return self.words(ACCURACY)

    def words(self, score: ScoreUnit) -> str:
        """Describes the seed, with its contribution in the unit of the score."""
        if self.kept and self.merged == self.planted:
            return f"{self.name}: planted and merged at epoch {self.planted}{self.measured(score)}"
        planted = f"planted at epoch {self.planted}, "
        if self.kept and self.until == self.planted:
            planted = "planted and "
        return f"{self.name}: {planted}{self.end}{self.measured(score)}"

    def measured(self, score: ScoreUnit) -> str:
        """Describes what was measured of it, behind a comma; "" for nothing."""
        words = ""
        if self.trial is not None:
            words += f", trial {score.difference(self.trial)}"
        if self.contribution is not None:
            words += f", contribution {score.difference(self.contribution)}"
        if self.contribution_error is not None:
            error = with_unit(score.value(self.contribution_error, unit=False), score.gap)
            words += f" (standard error {error})"
        return words


MERGED = "MERGED"
"""Stage of a stretch in which a slot is free, and seeds of it are a part of its layers."""


@dataclass(frozen=True)
class Stretch:
    """A slot in one stage, or ``MERGED``, from one epoch to another."""

    slot: str
    stage: str
    blueprint: str | None
    begin: int
    end: int
    cause: str
    width: float | None = None
    """Of stage ``MERGED``, the width of the layer at its end, in units of its first width; None if unknown."""


@dataclass
class Life:
    """Folds the events of one host, in order, into everything that happened in its slots.

    A seed planted before the first event is not among its seeds.
    """

    episode: int
    env: int
    end: int = 0
    """Number of epochs done so far."""
    seeds: list[TriedSeed] = field(default_factory=list)
    """In order of germination."""
    present: dict[str, TriedSeed] = field(default_factory=dict)
    """Seeds that are in the host, by slot."""
    refused: Counter[str] = field(default_factory=Counter)
    """Number of seeds that could not be planted, by blueprint."""
    rollbacks: list[int] = field(default_factory=list)
    """Their epochs."""
    changes: dict[str, list[StageChanged]] = field(default_factory=dict)
    """By slot, in the order of time."""
    widths: dict[int, dict[str, float | None]] = field(default_factory=dict)
    """By epoch, the width of the layer at each slot of which seeds are in the layers, in units of its first width."""
    _fossil_parameters: int = 0

    def state_dict(self) -> dict[str, Any]:
        """Returns the seeds, of a host whose layers give up no units, as JSON."""
        return {
            "seeds": list(map(asdict, self.seeds)),
            "fossil_parameters": self._fossil_parameters,
            "changes": [asdict(change) for changes in self.changes.values() for change in changes],
            "end": self.end,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        from esper.telemetry.records import build  # only a loop that is resumed needs it

        self.seeds = [build(TriedSeed, seed) for seed in state["seeds"]]
        self.present = {}
        for seed in self.seeds:
            if seed.merged is None and seed.cause is None:
                self.present[seed.slot] = seed
        self._fossil_parameters = state["fossil_parameters"]
        self.end = state["end"]
        self.changes = {}
        for saved in state["changes"]:
            change = build(StageChanged, saved)
            self.changes.setdefault(change.slot, []).append(change)

    def handle(self, event: Event) -> None:
        """Takes one event of this host; irrelevant ones are ignored."""
        match event:
            case StageChanged():
                self._change(event)
            case EpochCompleted():
                self._restore(event)
                self._measure(event)
            case ActionTaken(accepted=False, blueprint=str() as blueprint):
                self.refused[blueprint] += 1
            case ActionTaken(accepted=False) if seed := self.present.get(event.slot or ""):
                seed.refusals += 1
                seed.refusal = event.reason
            case GovernorRollback():
                self.rollbacks.append(event.epoch)

    def newest(self, slot: str) -> TriedSeed | None:
        """Returns the seed that was planted last in a slot; None without one."""
        return next((seed for seed in reversed(self.seeds) if seed.slot == slot), None)

    def in_layers(self, slot: str) -> list[TriedSeed]:
        """Returns the seeds of a slot that are a part of its layers, in order."""
        return [seed for seed in self.seeds if seed.slot == slot and seed.merged is not None and seed.released is None]

    def _restore(self, event: EpochCompleted) -> None:
        """Notes units that a rollback has put back into their layers."""
        for slot, merges in event.merges.items():
            released = [seed for seed in self.seeds if seed.slot == slot and seed.released is not None]
            missing = merges - len(self.in_layers(slot))
            for seed in released[:missing] if missing > 0 else []:
                seed.released = None
                seed.cause = None
                seed.stage = "FOSSILIZED"

    def _change(self, event: StageChanged) -> None:
        self.end = max(self.end, event.epoch)
        self.changes.setdefault(event.slot, []).append(event)
        if event.cause == "shrink":
            self._release(event)
            return
        planted = event.after == "GERMINATED" or event.before == "DORMANT"  # some are kept at once
        if planted and event.blueprint is not None:
            new = TriedSeed(
                event.slot,
                event.blueprint,
                event.epoch,
                stage="",
                until=event.epoch,
            )
            self.present[event.slot] = new
            self.seeds.append(new)
        seed = self.present.get(event.slot)
        if seed is None:
            return
        if event.cause == "merged":
            seed.merged = event.epoch
            del self.present[event.slot]
            return
        if seed.released is not None:
            if event.after == "PRUNED":
                del self.present[event.slot]
            return
        seed.until = event.epoch
        if event.after == "PRUNED":
            seed.cause = event.cause
            del self.present[event.slot]
            return
        seed.stage = event.after
        if event.after in ("BLENDING", "FOSSILIZED"):
            seed.blended = True
        if event.after == "FOSSILIZED":
            seed.contribution_kept = seed.contribution

    def _release(self, event: StageChanged) -> None:
        """Takes units out of a layer: at once, or as a seed that fades."""
        merged = self.in_layers(event.slot)
        if not merged:
            return
        seed = merged[-1]
        seed.released = event.epoch
        seed.stage = event.after
        seed.cause = "shrink"
        if event.after != "PRUNED":
            self.present[event.slot] = seed

    def _measure(self, event: EpochCompleted) -> None:
        """Records contributions, widths, and the size of a seed kept in this epoch."""
        self.end = max(self.end, event.epoch)
        self.widths[event.epoch] = {slot: event.widths.get(slot) for slot in event.merges}
        new = [seed for seed in self.present.values() if seed.kept and seed.parameters is None]
        added = event.fossil_parameters - self._fossil_parameters
        # An env takes one action per epoch, so that at most one seed is new.
        if len(new) == 1 and added > 0:
            new[0].parameters = added
        self._fossil_parameters = event.fossil_parameters
        for slot, seed in self.present.items():
            if not seed.kept and seed.released is None:
                seed.until = event.epoch
            if slot in event.contributions:
                seed.contribution = event.contributions[slot]
                seed.contribution_error = event.contribution_errors.get(slot)

    @property
    def stretches(self) -> list[Stretch]:
        """The stages of every slot that was not as at first, by slot; those shorter than an epoch have length 0."""
        stretches = []
        for slot, changes in self.changes.items():
            # A stage lasts until the next change, the last one until the end.
            ends = [change.epoch for change in changes[1:]]
            ends.append(self.end)
            for change, end in zip(changes, ends, strict=True):
                stage = change.after
                width = None
                if stage == "DORMANT":
                    trained = end > change.epoch
                    if change.cause != "merged" and not (trained and slot in self.widths.get(end, {})):
                        continue
                    stage = MERGED
                    if trained:
                        width = self.widths.get(end, {}).get(slot)
                stretches.append(
                    Stretch(
                        slot,
                        stage,
                        change.blueprint,
                        change.epoch,
                        end,
                        change.cause,
                        width,
                    )
                )
        return stretches

    def words(self) -> str:
        """Describes the lifecycles for readers who cannot see the chart."""
        events = []
        for stretch in self.stretches:
            seed = stretch.blueprint or "seed"
            stage = stretch.stage.lower()
            if stretch.width is not None:
                seed = "its layer,"
                stage = f"{times(stretch.width)},"
            events.append(f"{stretch.slot}: {seed} {stage} from epoch {stretch.begin} to {stretch.end}")
        events += [f"rollback at epoch {epoch}" for epoch in self.rollbacks]
        return f"host {self.env}: " + ("; ".join(events) or "no seed was planted")
