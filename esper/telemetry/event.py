"""Typed events of a run.

Every event is a frozen dataclass. A field marked with :func:`volatile` may differ between two runs of the same seed
(clock times, durations, paths); all others are the same, bit for bit, on the same CPU.

Accuracies are percentages (pp, 0 to 100), losses are natural-log cross-entropy, times are seconds. In a run with
:class:`ScoreDefined`, fields named accuracy hold its score, in percentage points, and losses are those of its task.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


def volatile() -> Any:
    """A dataclass field whose value may differ between two runs of the same seed."""
    return dataclasses.field(metadata={"volatile": True})


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all events; its class name is the event's name in the log."""


@dataclass(frozen=True, slots=True)
class HostEvent(Event):
    """Base of events of one host: episode ``episode`` of env ``env``, after ``epoch`` epochs."""

    env: int
    episode: int
    epoch: int


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
    """Execution of steps of hosts: eager, compiled or graph; None if hosts are simulated, or trained
    by a loop outside Esper (``esper.Grower``)."""
    precision: str | None
    """Number format of the computation; None as ``tier``."""
    micro_batches: int
    """Number of parts that each batch is split into."""
    tier_refused: str | None = volatile()
    """The reason that the tier of the config cannot be used; may name files."""
    time: float = volatile()
    folder: str = volatile()
    host_flops: float = 0.0
    """Floating-point operations of a forward pass of the host without seeds, a sample. Older logs lack this field; it
    reads as 0."""
    cublas_workspace: str | None = None
    """cuBLAS workspace of each stream and its origin, on which results may depend; None without a GPU."""


@dataclass(frozen=True, slots=True)
class ScoreDefined(Event):
    """Hosts are scored by something else than accuracy. It follows RunStarted and RunResumed."""

    name: str
    unit: str
    """Unit in which it is shown; empty for none."""
    points: float
    """Percentage points in one unit."""
    priced: bool = False
    of_reward: float = 0.0
    """See ``esper.telemetry.score.ScoreUnit``. Older logs lack these two fields."""


@dataclass(frozen=True, slots=True)
class RunResumed(Event):
    """A run continues from its checkpoint, with this tier and workspace; the rest equals an uninterrupted run."""

    round: int
    """Number of completed rounds."""
    rounds: int
    n_envs: int
    episode_length: int
    tier: str | None
    tier_refused: str | None = volatile()
    time: float = volatile()
    warnings: tuple[str, ...] = dataclasses.field(default=(), metadata={"volatile": True})
    """Problems with files of the run folder that were ignored."""
    epochs: int = 0
    """Epochs done in the current round by each host whose episode had not ended; 0 between two rounds."""
    cublas_workspace: str | None = None


@dataclass(frozen=True, slots=True)
class StepsNotCaptured(Event):
    """Some work is left to PyTorch instead of a graph or compiled code; each reason is reported once."""

    reason: str


@dataclass(frozen=True, slots=True)
class BaselineMeasured(Event):
    """No-growth curves: means over ``episodes`` hosts left alone, indexed by epochs done (0: untrained).
    A loop outside Esper may have given the accuracies; the losses are then unknown, and empty.
    """

    episodes: int
    accuracy: tuple[float, ...]
    loss: tuple[float, ...]
    final_loss_std: float
    class_accuracy: tuple[float, ...] = ()
    """Mean of what ``EpisodeCompleted.class_accuracy`` is of grown hosts."""


@dataclass(frozen=True, slots=True)
class ActionTaken(HostEvent):
    """An action by the names of its heads' values, and its outcome; WAIT is reported with
    ``telemetry.level`` debug only.

    A head that does not matter for the op is None; tempo and speed are in epochs. Older logs lack fields with defaults.
    """

    op: str
    slot: str | None
    blueprint: str | None
    accepted: bool
    reason: str
    style: str | None = None
    tempo: int | None = None
    alpha_target: float | None = None
    alpha_speed: int | None = None
    alpha_curve: str | None = None
    masked: dict[str, tuple[str, ...]] | None = None
    """Illegal choices of each head, given the heads before it; heads whose choices were all legal are missing."""
    log_prob: float | None = None
    """Natural logarithm of the joint probability with which the controller chose the action; None if it has none."""


@dataclass(frozen=True, slots=True)
class GateEvaluated(HostEvent):
    """A gate's answer to a requested transition; checks are (name, passed, measured value, threshold)."""

    slot: str
    gate: str
    passed: bool
    score: float
    checks: tuple[tuple[str, bool, float | None, float | None], ...]


@dataclass(frozen=True, slots=True)
class StageChanged(HostEvent):
    slot: str
    blueprint: str | None
    before: str
    after: str
    cause: str
    """The action, or an event of training: "merged" for a seed that became a part of the host's layers, "shrink" for
    units that PRUNE takes out of these again, and those of :data:`CAUSES`, which remove a seed."""


CAUSES = {
    "prune": "pruned by the controller",
    "faded": "pruned by the controller, after its alpha had faded to 0",
    "rollback": "lost when the governor restored the host",
    "not finite": "removed because a value was not finite",
    "stuck in training": "removed because gate G2 did not open in time",
    "shrink": "taken out of its layer by the controller",
}
"""Causes of a change of stage that removes a seed, in words."""


@dataclass(frozen=True, slots=True)
class SeedCut(HostEvent):
    """A living seed became non-finite and was removed without a rollback."""

    slot: str
    blueprint: str


@dataclass(frozen=True, slots=True)
class GovernorRollback(HostEvent):
    reason: str
    value: float
    threshold: float
    restored_epoch: int
    rollbacks: int


@dataclass(frozen=True, slots=True)
class EpochCompleted(HostEvent):
    """One epoch of one env, after the governor: the controller's observation and reward."""

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
    """Standard errors of ``contributions``, pp. Older logs lack this field and the next ones; they read as empty."""
    needs: dict[str, float] = dataclasses.field(default_factory=dict)
    """The last measured need of each vacant slot, in units of the loss, see ``esper.hosts.need``."""
    gradients: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    """Statistics of the gradients of the host (``host``) and of each seed that learns, by slot: norm, health,
    vanishing, exploding, and of a seed the ratio to the host's; means over the epoch's batches, before clipping."""
    merges: dict[str, int] = dataclasses.field(default_factory=dict)
    """Number of seeds that are a part of the host's layers, by slot."""
    widths: dict[str, float] = dataclasses.field(default_factory=dict)
    """Width of the layer at each slot whose layer is no longer as at first, in units of its first width."""


@dataclass(frozen=True, slots=True)
class ContextDrawn(Event):
    """An episode of the task `varied` began; see ``esper.exam.context.Context``."""

    env: int
    episode: int
    source: str
    width: int
    samples: int
    epochs: int
    price: float
    noise: float
    optimizer: str
    learning_rate: float


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
    """Shapley value of each seed that is on and its standard error, pp; empty unless all coalitions were measured."""
    host_flops: float = 0.0
    """Floating-point operations of a forward pass of the host without seeds, a sample. Older logs lack this field and
    the next one; they read as 0."""
    fossil_flops: float = 0.0
    merges: dict[str, int] = dataclasses.field(default_factory=dict)
    """Number of seeds that have become a part of the host's layers, by slot; ``fossils`` are those beside them. Older
    logs lack this field; it reads as empty."""
    class_accuracy: tuple[float, ...] = ()
    """Accuracy of the committed network on the validation samples of each class, pp; NaN for a class without samples.
    Empty after a rollback in the last epoch, if a sample has several targets or none, if the score is not accuracy,
    with more than 100 classes, and in older logs."""
    stopped: str | None = None
    """The reason that it ended early: divergence or plateau (``env.stop_on``); None if it had its full length."""


@dataclass(frozen=True, slots=True)
class RoundCompleted(Event):
    """One round, counted from 1. Means are over its hosts; ``fossils`` is the mean number per host.

    ``committed_accuracy`` is that of committed networks on validation images, ``baseline_accuracy`` that of the
    no-growth baseline at the same epoch. The other two accuracies are on test images, of the grown hosts and of the
    same hosts left alone; None in a round that an agent learns from, and in a loop outside Esper. In such a loop,
    ``baseline_accuracy`` is that of the model as it is without its seeds, unless BaselineMeasured has a curve.
    ``mean_return`` is discounted, but not in such a loop. ``samples`` is 0 if unknown. ``seconds`` includes the hosts
    left alone; rates and ``phase_seconds`` do not. ``phase_seconds`` are wall seconds by phase
    (``esper.telemetry.span.PHASES``), each counted once; phases never entered are missing, and reporting the round is
    in none. ``memory`` is the memory in use at the end of the round, bytes by kind and place
    (``esper.telemetry.memory``); it is empty in older logs.
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
    need: float | None = None
    """Mean of the needs of vacant slots that were measured last; None if none were, and in older logs."""


@dataclass(frozen=True, slots=True)
class RanksWaited(Event):
    """Seconds of the joint work of ranks in a round, and how many of them each rank only waited for others."""

    round: int
    seconds: float = volatile()
    waited: tuple[float, ...] = volatile()


@dataclass(frozen=True, slots=True)
class AgentValidated(Event):
    """The agent played its most likely actions on hosts that it does not learn from; the best agent so far is kept."""

    round: int
    """Number of rounds that it had learned from."""
    mean_return: float
    """Discounted."""
    best_round: int
    """The round of the best agent, which may be this one."""
    rules: dict[str, float] = dataclasses.field(default_factory=dict)
    """Mean returns of rules on the same hosts, by name; empty if they were not played."""


@dataclass(frozen=True, slots=True)
class PolicyUpdated(Event):
    """The agent learned from a round; means over the update's minibatches unless stated otherwise.

    ``env_steps`` counts from the start of the run. ``approx_kl`` is that of the last minibatch (k3 estimator); the
    update stops early if it is too large. Entropies are normalised to [0, 1]: ``entropy`` is their sum over the heads
    that affected the action, ``head_entropies`` are means over the steps in which a head did. Older logs lack the
    fields with defaults.
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
    ratio_max: float | None = None
    ratio_min: float | None = None
    """Largest and smallest probability ratio, new to old policy, of any action in any minibatch."""
    value_std: float | None = None
    target_std: float | None = None
    """Standard deviations of the critic's values in the rollout and of their targets, in units of scaled rewards."""
    clipped_gradients: float | None = None
    """Fraction of the minibatches whose gradient norm was clipped."""
    skipped_minibatches: int = 0
    """Minibatches left out because their loss or gradient was not finite."""
    broken_steps: int = 0
    """Steps of the rollout with a non-finite value. If there are any, the agent does not learn from the round."""
    choice_entropies: dict[str, float] = dataclasses.field(default_factory=dict)
    """As ``head_entropies``, over steps with more than one legal choice of the head; heads without them are missing."""
    head_choices: dict[str, int] = dataclasses.field(default_factory=dict)
    """Number of those steps."""


@dataclass(frozen=True, slots=True)
class AnomalyDetected(Event):
    """A problem in how the agent learns or a controller acts. It does not change the run.

    ``kind`` is one of ``esper.telemetry.anomaly.KINDS``, ``head`` the head of the policy concerned, if any; ``found``
    describes the problem and ``advice`` what to try. ``measured`` lies beyond ``threshold``.
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
    """A controller played one round of a comparison; ``test_accuracy`` is the mean over the round's hosts."""

    controller: str
    round: int
    rounds: int
    test_accuracy: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """The run's controller and another one on the same hosts: mean test accuracies of committed networks, and their
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
    """The result of the run; ``parameters`` and ``fossils`` are means over the hosts of the comparison, 0 without."""

    controller: str
    pairs: int
    comparisons: tuple[Comparison, ...]
    host_parameters: int
    parameters: float
    fossils: float
    seconds: float = volatile()
