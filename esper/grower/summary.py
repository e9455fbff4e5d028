"""The result of a Grower: layers and sizes before and after, and every seed that was tried."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from esper.config import Durations
from esper.core.action import TEMPOS
from esper.core.units import LayerUnits, layer_units
from esper.env.reporting import standing_of
from esper.grower.env import LoopEnv
from esper.telemetry import html
from esper.telemetry.score import ScoreUnit
from esper.telemetry.seed_history import TriedSeed
from esper.telemetry.text import count, times

if TYPE_CHECKING:
    from esper.grower.grower import Grower

ONLY_A_SECOND_TRAINING = (
    "Whether the model is better than the same model trained alone, only a second training tells: esper.grow makes it."
)


@dataclass(frozen=True)
class GrowthSummary:
    """The result of a Grower; as a text, a report of a few lines. Scores are in the unit of ``evaluate``."""

    epochs: int
    layers: tuple[LayerUnits, ...]
    """In the order of a forward pass; without growth, ``after`` equals ``before``."""
    parameters_before: int
    parameters: int
    """Number of parameters of the model with its kept seeds."""
    operations_before: float
    operations: float
    """Floating-point operations of a forward pass, a sample; 0 if unknown."""
    score: float
    """Score of the model with its kept seeds, as of the last step."""
    without_seeds: float | None
    """Score of the same weights without what was grown; None if that is a part of the layers, or was not measured."""
    alone: float | None
    """Last score of the training without growth that was given as ``baseline``."""
    tried: tuple[TriedSeed, ...]
    """Every seed that was planted, in that order."""
    note: str
    """The reason that none was planted, if it is known."""
    unit: ScoreUnit
    reason: str = ""
    """The expectation of an advisor, or why another controller decides, in words."""

    def _repr_html_(self) -> str:
        return html.lines(str(self))

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        sizes = f"{self.parameters_before:,} -> {self.parameters:,} parameters"
        if self.operations:
            sizes += f", {self.operations_before:,.0f} -> {self.operations:,.0f} operations a sample"
        grew = times(self.parameters / max(1, self.parameters_before))
        yield f"Growth in {count(self.epochs, 'epoch')}: {sizes} ({grew} parameters)"
        if self.reason:
            yield f"  {self.reason}"
        for layer in self.layers:
            if layer.after != layer.before:
                yield f"  {layer}"
        for seed in self.tried:
            yield f"  {seed.words(self.unit)}"
        if not self.tried:
            yield f"  nothing was planted{self.note}"
        yield self._scores()
        if self.alone is None and self.kept:
            yield ONLY_A_SECOND_TRAINING

    def _scores(self) -> str:
        words = f"Score {self.score:.4g}"
        if self.without_seeds is not None and self.kept:
            words += f"; {self.without_seeds:.4g} without what was grown, on which the rest relies"
        if self.alone is not None:
            words += f"; {self.score - self.alone:+.3g} against {self.alone:.4g} of the training without growth "
            words += "that was given"
        return words

    @property
    def kept(self) -> int:
        """Number of seeds that were kept."""
        return sum(seed.kept for seed in self.tried)

    def scalars(self) -> dict[str, float]:
        """Returns the numbers for a logger, by names under ``growth/``."""
        found = {
            "parameters": self.parameters,
            "parameters_before": self.parameters_before,
            "operations": self.operations,
            "score": self.score,
            "tried": len(self.tried),
            "kept": self.kept,
            "removed": sum(bool(seed.removed) for seed in self.tried),
        }
        if self.without_seeds is not None:
            found["score_without"] = self.without_seeds
        for layer in self.layers:
            found[f"units/{layer.name}"] = layer.after
        return {f"growth/{name}": value for name, value in found.items()}


def summary_of(grower: Grower) -> GrowthSummary:
    """Returns the summary of a loop as it is now, or at its end. Raises RuntimeError if it never stepped."""
    record = grower.record
    env = env_of(grower)
    if record.summary is not None:
        return record.summary
    life = record.life
    for slot, reason in standing_of(env, "the controller").items():
        life.present[record.names[slot]].standing = reason
    points = env.backend.points
    state = env.state
    alone = None
    if env.known is not None:
        alone = env.known[-1] / points
    without: float | None = float(state.all_off[0]) / points
    in_layers = any(seed.merged is not None for seed in life.seeds)  # those cannot be switched off
    if in_layers or math.isnan(state.all_off[0]):
        without = None
    parameters = env.host_parameters + int(state.slots.fossil_parameters[0])
    operations = env.choices.host_flops
    if operations:
        operations += float(env.rules.fossil_flops(state.slots)[0])
    return GrowthSummary(
        epochs=grower.epoch,
        layers=tuple(_layers(env)),
        parameters_before=env.host_parameters,
        parameters=parameters,
        operations_before=env.choices.host_flops,
        operations=operations,
        score=float(state.committed[0]) / points,
        without_seeds=without,
        alone=alone,
        tried=tuple(map(replace, life.seeds)),
        note=_too_short(env),
        unit=env.score_unit,
        reason="".join(getattr(grower.controller, "reasons", [])) or grower.reason,
    )


def html_of(grower: Grower) -> str:
    """Returns the summary of a loop for a notebook, with a chart of its life; before the first epoch, its slots."""
    grown = grower.record.scores[grower.started :]  # from epoch 1 on
    if not grown:
        return html.table(("slot",), [(name,) for name in grower.record.names.values()])
    from esper.show.charts import PAPER
    from esper.show.life import HostLife, life_chart  # slow to import

    record = grower.record
    env = env_of(grower)
    alone: list[float] = []
    if env.known is not None:
        alone = [score / env.backend.points for score in env.known[: len(grown)]]
    host = HostLife(
        title=f"Growth of {type(grower.model).__name__}",
        words="",
        life=record.life,
        slots=[record.names[slot] for slot in env.action_spec.slots],
        score=env.score_unit,
        grown=grown,
        alone=alone,
    )
    return html.lines(str(summary_of(grower))) + html.picture(life_chart(host, PAPER).svg)


def env_of(grower: Grower) -> LoopEnv:
    """Returns the env of a loop. Raises RuntimeError if it never stepped."""
    if grower.env is not None:
        return grower.env
    raise RuntimeError("grower.step() was never called, so nothing has grown; call it after each epoch")


def _layers(env: LoopEnv) -> Iterator[LayerUnits]:
    """Yields the layers that can be widened, in the order of a pass."""
    slots = env.action_spec.slots
    widths = env.choices.widths.tolist()
    first = dict(zip(slots, widths, strict=True))
    for name, site in env.backend.hooks.sites.items():
        path = env.backend.hooks.paths[name]
        if path.source is None:
            continue
        layer = layer_units(site, path.source, path.sink, first[name])
        if layer is not None:
            yield layer


def _too_short(env: LoopEnv) -> str:
    """Returns words for a horizon in which no seed can be tried, blended in and kept; "" for a longer one."""
    epochs = env.config.env.episode_length
    needed = 2 + Durations.of(env.config, epochs).min_training_epochs + min(TEMPOS)
    if epochs >= needed:
        return ""
    return f": a seed that is tried needs {needed} decisions to be kept, and the horizon has {epochs}"
