"""Typed events: what a run says about itself.

Every event is a frozen dataclass. A field marked with :func:`volatile` may differ between two runs of the same seed
(clock times, durations, paths); all others are the same, bit for bit, on the same CPU.

Accuracies are percentages (pp, 0 to 100), losses are natural-log cross-entropy, times are seconds.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

SCHEMA_VERSION = 1


def volatile() -> Any:
    """A dataclass field whose value may differ between two runs of the same seed."""
    return dataclasses.field(metadata={"volatile": True})


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all events; its class name is the event's name in the log."""


@dataclass(frozen=True, slots=True)
class RunStarted(Event):
    task: str
    controller: str
    seed: int
    rounds: int
    n_envs: int
    episode_length: int
    host_parameters: int
    slots: tuple[str, ...]
    blueprints: tuple[str, ...]
    tier: str | None
    """How steps of hosts are carried out: eager, compiled or graph; None where hosts are simulated."""
    precision: str | None
    """What they compute with; None where hosts are simulated."""
    micro_batches: int
    """Parts that a batch is computed in."""
    tier_refused: str | None = volatile()
    """Why that is not the tier of the config; may name files."""
    time: float = volatile()
    folder: str = volatile()
    cublas_workspace: str | None = None
    """Memory that cuBLAS has for each lane, and who chose it, which its results may depend on; None without a GPU."""
    pinned_copies: tuple[str, ...] = ()
    """Copies of hosts that lie in pinned CPU memory (``esper.training.placement.HostCopy``), because they would take
    more of a GPU's than ``run.max_device_copies_mib``. Logs of an Esper that did not write them read as empty."""


@dataclass(frozen=True, slots=True)
class RunResumed(Event):
    """A run goes on from its checkpoint; the events that follow are those it would have had without the stop."""

    round: int
    """Rounds that were done."""
    rounds: int
    n_envs: int
    episode_length: int
    tier: str | None
    """As in RunStarted: here, now."""
    tier_refused: str | None = volatile()
    time: float = volatile()
    warnings: tuple[str, ...] = dataclasses.field(default=(), metadata={"volatile": True})
    """What was wrong with files of the run folder, and was passed over."""
    epochs: int = 0
    """That were done of the round under way, in each of its hosts whose episode had not ended; 0 between two rounds."""
    cublas_workspace: str | None = None
    """As in RunStarted: here, now."""


@dataclass(frozen=True, slots=True)
class StepsNotCaptured(Event):
    """Some steps on a GPU are queued by Python and not launched as a graph; each reason is told once."""

    reason: str


@dataclass(frozen=True, slots=True)
class MicroBatchHalved(Event):
    """Memory ran out. From the epoch that it happened in, which is done again from its beginning, all hosts of the run
    compute batches in ``micro_batches`` parts, twice as many as before; ``batch`` is where it happened."""

    env: int
    epoch: int
    batch: int
    micro_batches: int
    reason: str


@dataclass(frozen=True, slots=True)
class BaselineMeasured(Event):
    """The no-growth curves of the run: means over ``episodes`` hosts left alone, by epochs done (0: untrained)."""

    episodes: int
    accuracy: tuple[float, ...]
    loss: tuple[float, ...]
    final_loss_std: float


@dataclass(frozen=True, slots=True)
class ActionTaken(Event):
    """One action with its outcome; WAIT is not reported."""

    env: int
    episode: int
    epoch: int
    op: str
    slot: str | None
    blueprint: str | None
    accepted: bool
    reason: str


@dataclass(frozen=True, slots=True)
class GateEvaluated(Event):
    """A gate's answer when a transition was asked for; checks are (name, held, measured value, threshold)."""

    env: int
    episode: int
    epoch: int
    slot: str
    gate: str
    passed: bool
    score: float
    checks: tuple[tuple[str, bool, float | None, float | None], ...]


@dataclass(frozen=True, slots=True)
class StageChanged(Event):
    env: int
    episode: int
    epoch: int
    slot: str
    blueprint: str | None
    before: str
    after: str
    cause: str


@dataclass(frozen=True, slots=True)
class SeedCut(Event):
    """A living seed became non-finite and was removed without a rollback."""

    env: int
    episode: int
    epoch: int
    slot: str
    blueprint: str


@dataclass(frozen=True, slots=True)
class GovernorRollback(Event):
    env: int
    episode: int
    epoch: int
    reason: str
    value: float
    threshold: float
    restored_epoch: int
    rollbacks: int


@dataclass(frozen=True, slots=True)
class EpochCompleted(Event):
    """One env's epoch after the governor: what the controller sees and is paid for."""

    env: int
    episode: int
    epoch: int
    train_loss: float
    train_accuracy: float
    validation_loss: float
    validation_accuracy: float
    committed_accuracy: float
    baseline_accuracy: float
    parameters: int
    fossil_parameters: int
    contributions: dict[str, float]
    stages: dict[str, str]
    reward: float
    reward_terms: dict[str, float]
    contribution_errors: dict[str, float] = dataclasses.field(default_factory=dict)
    """Standard errors of ``contributions``, pp. Logs of an Esper that did not write them read as empty."""


@dataclass(frozen=True, slots=True)
class EpisodeCompleted(Event):
    env: int
    episode: int
    epochs: int
    total_reward: float
    validation_accuracy: float
    committed_accuracy: float
    baseline_accuracy: float
    host_parameters: int
    fossil_parameters: int
    fossils: dict[str, str]
    rollbacks: int
    terminated: bool
    shapley: dict[str, tuple[float, float]]
    """Shapley value of each blended seed on validation samples, and its standard error, pp; empty where not every
    coalition of them was measured."""
    stopped: str | None = None
    """Why it was cut short: divergence or plateau (``env.stop_on``); None for an episode that came to its true end."""


@dataclass(frozen=True, slots=True)
class RoundCompleted(Event):
    """One round, counted from 1; means are over its hosts, ``fossils`` is the mean number a host.

    ``committed_accuracy`` is that of committed networks on validation images, ``baseline_accuracy`` that of the
    no-growth baseline at the same epoch. The other two are on test images, of the grown hosts and of the same hosts
    left alone; None in a round that an agent learns from, whose hosts prove nothing. ``mean_return`` is discounted.
    ``seconds`` is this round's, twins included; rates count the grown hosts only, and so does ``phase_seconds``: wall
    seconds by phase (``esper.telemetry.span.PHASES``), each counted once. Phases never entered are missing, and what it
    costs to report the round itself is in none. ``memory`` is what the run used at the end of the round, bytes by kind
    and place (``esper.telemetry.memory``), twins included; logs of an Esper that did not write it read as empty.
    """

    round: int
    rounds: int
    episodes: int
    mean_return: float
    committed_accuracy: float
    baseline_accuracy: float
    test_accuracy: float | None
    alone_test_accuracy: float | None
    fossils: float
    rollbacks: int
    illegal_actions: int
    epochs: int
    samples: int
    seconds: float = volatile()
    epochs_per_second: float = volatile()
    images_per_second: float = volatile()
    phase_seconds: dict[str, float] = volatile()  # noqa: RUF009  a field, not a default
    memory: dict[str, int] = dataclasses.field(default_factory=dict, metadata={"volatile": True})


@dataclass(frozen=True, slots=True)
class PracticeRound(Event):
    """The agent played a round on simulated hosts, before it met real ones; ``mean_return`` is discounted."""

    round: int
    rounds: int
    mean_return: float


@dataclass(frozen=True, slots=True)
class PolicyUpdated(Event):
    """The agent learned from a round; means over the update's minibatches unless said otherwise.

    ``env_steps`` are all since the run began. ``approx_kl`` is that of the last minibatch (k3 estimator), at which the
    update stops when it is too large. Entropies are normalised to [0, 1], ``entropy`` is their sum over the heads that
    mattered, ``head_entropies`` are means over the steps in which a head mattered.
    """

    round: int
    env_steps: int
    policy_loss: float
    value_loss: float
    entropy: float
    head_entropies: dict[str, float]
    approx_kl: float
    clip_fraction: float
    explained_variance: float
    gradient_norm: float
    gradient_health: float
    learning_rate: float
    entropy_coefficient: float
    reward_scale: float
    minibatches: int
    stopped_early: bool
    # Logs of an Esper that did not write the following read as these defaults.
    ratio_max: float | None = None
    """Largest probability ratio, now to then, of any action in any minibatch ..."""
    ratio_min: float | None = None
    """... and the smallest."""
    value_std: float | None = None
    """Standard deviation of the values that the critic gave in the rollout ..."""
    target_std: float | None = None
    """... and of what they should have been, both in units of scaled rewards."""
    clipped_gradients: float | None = None
    """Part of the minibatches whose gradient was longer than the limit it is clipped to."""
    skipped_minibatches: int = 0
    """Left out, because their loss or gradient was not finite: the weights stayed as they were."""
    broken_steps: int = 0
    """Steps of the rollout that hold a number that is not finite. Where there is one, nothing was learned from it."""
    choice_entropies: dict[str, float] = dataclasses.field(default_factory=dict)
    """As ``head_entropies``, but over the steps only in which the head had more than one legal choice; a head that had
    none is missing."""
    head_choices: dict[str, int] = dataclasses.field(default_factory=dict)
    """How many steps these were."""


@dataclass(frozen=True, slots=True)
class AnomalyDetected(Event):
    """Something in how the agent learns is not as it should be. The run goes on as it would have without this.

    ``kind`` is one of ``esper.telemetry.anomaly.KINDS``, ``head`` the head of the policy that it is about, if it is
    about one; ``found`` says what is wrong and ``advice`` what to try. ``measured`` lies beyond ``threshold``.
    """

    round: int
    kind: str
    head: str | None
    measured: float
    threshold: float
    found: str
    advice: str


@dataclass(frozen=True, slots=True)
class ArmPlayed(Event):
    """A controller played one round of a comparison; test accuracy, mean over the round's hosts."""

    controller: str
    round: int
    rounds: int
    test_accuracy: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """The run's controller against one other on the same hosts: mean test accuracies of committed networks, and the
    difference with its 95 % interval and Holm-corrected p value."""

    reference: str
    accuracy: float
    reference_accuracy: float
    difference: float
    low: float
    high: float
    p_value: float
    verdict: str


@dataclass(frozen=True, slots=True)
class RunCompleted(Event):
    """What the run ends with; ``parameters`` and ``fossils`` are means over the hosts of the comparison."""

    controller: str
    pairs: int
    comparisons: tuple[Comparison, ...]
    host_parameters: int
    parameters: float
    fossils: float
    seconds: float = volatile()


def record(event: Event) -> dict[str, Any]:
    """The event as a JSON-ready dict: "event" (its name), "schema", and its fields; non-finite floats as strings."""
    return {"event": type(event).__name__, "schema": SCHEMA_VERSION, **plain(dataclasses.asdict(event))}


def stable_record(event: Event) -> dict[str, Any]:
    """``record`` without the volatile fields: equal for two runs of the same seed."""
    fields = record(event)
    for field in dataclasses.fields(event):
        if field.metadata.get("volatile"):
            del fields[field.name]
    return fields


def plain(value: Any) -> Any:
    """JSON has no NaN or infinity: write them as strings, so that the log stays readable by every parser."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value
