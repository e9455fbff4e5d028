"""Gates: the measured conditions of stage transitions. A value that was not measured fails its check.

Accuracies and contributions are in percentage points (pp).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from esper.config import Durations, GateConfig
from esper.seeds.alpha import AlphaController
from esper.seeds.stage import SeedStage


@dataclass(frozen=True)
class Check:
    """One condition of a gate; ``value`` is None if it was not measured."""

    name: str
    held: bool
    value: float | None
    threshold: float | None
    failure: str
    """What is wrong if it does not hold."""


@dataclass(frozen=True)
class GateResult:
    """The checks of one gate, and whether all of them hold."""

    gate: str
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return all(check.held for check in self.checks)

    @property
    def score(self) -> float:
        """Fraction of the checks that hold."""
        return sum(check.held for check in self.checks) / len(self.checks)

    @property
    def reason(self) -> str:
        """Describes the failed checks; empty if the gate passed."""
        return "; ".join(check.failure for check in self.checks if not check.held)


@dataclass
class SeedMeasurements:
    """Measurements of one seed over the last epochs; None until measured."""

    gradient_norm: float | None = None
    gradient_ratio: float | None = None
    """(‖g_seed‖/√n_seed) / (‖g_host‖/√n_host + 1e-8), EMA over epochs."""
    gradient_health: float | None = None
    vanishing: float | None = None
    """Fraction of vanishing gradient tensors, averaged over the epoch's batches."""
    exploding: float | None = None
    trial: float | None = None
    """Accuracy with this incubating seed at its target alpha minus accuracy without it, on the same samples, pp."""
    trial_error: float | None = None
    """Paired standard error of ``trial``, pp."""
    contribution: float | None = None
    """Accuracy with everything on minus accuracy with this seed's alpha at 0, on the same samples, pp."""
    contribution_error: float | None = None
    contribution_change: float = 0.0
    interaction: float = 0.0
    """Sum of the pairwise interactions with the other blended seeds, pp."""
    epochs_since_measured: int = 0


@dataclass(frozen=True)
class GateEvidence:
    """Everything that a gate may read."""

    stage: SeedStage
    epochs_in_stage: int
    alpha: AlphaController
    measured: SeedMeasurements
    anomaly_pending: bool


def at_least(name: str, value: float | None, threshold: float) -> Check:
    failure = f"{name}: not measured" if value is None else f"{name}: {value:g}, at least {threshold:g} required"
    return Check(name, value is not None and value >= threshold, value, threshold, failure)


def _training(evidence: GateEvidence, _config: GateConfig, _durations: Durations) -> list[Check]:
    stage = evidence.stage
    failure = f"stage is {stage.name}, not GERMINATED"
    return [Check("stage is GERMINATED", stage is SeedStage.GERMINATED, float(stage), 2.0, failure)]


def _blending(evidence: GateEvidence, config: GateConfig, durations: Durations) -> list[Check]:
    measured, strict = evidence.measured, config.level == "strict"
    # A value that was not measured stays None, and a check on None never holds.
    slack = None if measured.trial_error is None else config.trial_standard_errors * measured.trial_error
    tolerated = 0.0 if strict else -(slack or 0.0)
    exploding = "not measured" if measured.exploding is None else f"{measured.exploding:g}, 0 required"
    checks = [
        at_least("epochs in TRAINING", evidence.epochs_in_stage, durations.min_training_epochs),
        Check(
            "exploding gradients",
            measured.exploding == 0,
            measured.exploding,
            0.0,
            f"exploding gradients: {exploding}",
        ),
        at_least("gradient health", measured.gradient_health, config.min_gradient_health),
        at_least("trial accuracy difference", measured.trial if slack is not None else None, tolerated),
    ]
    if strict:
        checks.append(at_least("gradient ratio", measured.gradient_ratio, config.min_gradient_ratio))
    return checks


def _holding(evidence: GateEvidence, config: GateConfig, durations: Durations) -> list[Check]:
    alpha = evidence.alpha
    moving = f"alpha is still moving to {alpha.target:g}: {alpha.done} of {alpha.steps} steps done"
    checks = [
        at_least("alpha target", alpha.target, 1.0),
        Check("alpha holds", alpha.holding, alpha.alpha, alpha.target, moving),
    ]
    if config.level == "strict":
        checks.append(at_least("epochs in BLENDING", evidence.epochs_in_stage, durations.min_blending_epochs))
    return checks


def _fossilized(evidence: GateEvidence, config: GateConfig, _durations: Durations) -> list[Check]:
    measured = evidence.measured
    both = measured.contribution is not None and measured.contribution_error is not None
    checks = [
        Check("contribution measured", both, measured.contribution, 0.0, "contribution: not measured"),
        Check(
            "no anomaly pending",
            not evidence.anomaly_pending,
            float(evidence.anomaly_pending),
            0.0,
            "an anomaly is pending",
        ),
    ]
    if config.level == "strict":
        error = measured.contribution_error or 0.0
        checks.append(at_least("contribution", measured.contribution, config.min_contribution))
        checks.append(at_least("contribution", measured.contribution, config.contribution_standard_errors * error))
    return checks


Rule = Callable[[GateEvidence, GateConfig, Durations], list[Check]]

GATES: Mapping[SeedStage, tuple[str, Rule]] = MappingProxyType(
    {
        SeedStage.TRAINING: ("G1", _training),
        SeedStage.BLENDING: ("G2", _blending),
        SeedStage.HOLDING: ("G3", _holding),
        SeedStage.FOSSILIZED: ("G5", _fossilized),
    }
)
"""Gates by the stage to enter. G0 (germination) depends on the slot and the registry: :func:`germination_gate`."""


def evaluate_gate(target: SeedStage, evidence: GateEvidence, config: GateConfig, durations: Durations) -> GateResult:
    """Evaluates every check of the gate in front of ``target``. Raises KeyError for a stage without a gate."""
    name, rule = GATES[target]
    return GateResult(name, tuple(rule(evidence, config, durations)))


def germination_gate(known: bool, empty: bool, seeds_left: int) -> GateResult:
    """Evaluates G0: the blueprint is known for this topology, the slot is empty, the seed cap is not reached."""
    return GateResult(
        "G0",
        (
            Check("blueprint known", known, float(known), 1.0, "the blueprint is unknown for this topology"),
            Check("slot empty", empty, float(empty), 1.0, "the slot is not empty"),
            at_least("seeds left under the cap", seeds_left, 1),
        ),
    )
