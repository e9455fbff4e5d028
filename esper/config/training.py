"""All parameters of a run, in a frozen tree of sections; the docstring under each field is its manual.

A size or rate that is None is the task's default: :mod:`esper.config.resolved` has the type without None. A duration
that is None scales with the horizon, see :class:`Durations`. Names of tasks, controllers and blueprints are checked
when an env or an experiment is made, where their registries are known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, ValidationError, model_validator

from esper.agents.spec import ControllerSpec
from esper.config.controllers import (
    HeuristicConfig,
    NeedConfig,
    PlateauConfig,
    PPOConfig,
)
from esper.config.files import toml_text
from esper.config.task import TaskConfig
from esper.config.telemetry import AnomalyConfig, TelemetryConfig, TrackConfig
from esper.config.types import Count, Devices, Finite, Fraction, Length, Listed, Names, NonNegative, Positive, Section
from esper.errors import ConfigError, did_you_mean

RewardMode = Literal["shaped", "simplified", "advantage", "sparse", "loss_shaped", "loss_sparse", "priced"]

MAX_PROBLEMS = 5
"""Max problems listed in one error."""
MAX_SHOWN = 200
"""Max characters shown of a refused value."""


class RunConfig(Section):
    seed: Annotated[int, Field(ge=0, lt=2**31, strict=True)] = 0
    """Seed of everything random in the run."""
    controller: str = "ppo"
    """Controller that chooses actions: ppo (an agent that learns), checkpoint:PATH (a trained agent), schedule (the one
    that comes with the task), schedule:FILE.toml, advisor, heuristic, plateau, need, random, none, or one of your own,
    path.py:function or path.py:Class."""
    rounds: Count | None = None
    """Number of rounds of n_envs episodes; None takes the task's default."""
    evaluation_pairs: Annotated[int, Field(ge=0, lt=2**31, strict=True)] = 16
    """Number of held-out hosts on which the trained agent is compared with each baseline; 0: none, ``esper eval`` can
    do it later."""
    checkpoint_every: Count = 1
    """Rounds between checkpoints; the last round, an interrupt and an error always write one."""
    checkpoint_minutes: Positive = 10.0
    """Minutes since the last checkpoint after which one is also written within a round, at the end of a step."""
    device: Devices = "cpu"
    """Device of the hosts: cpu, cuda, cuda:0, ...; several GPUs, as cuda:0,cuda:1, are assigned to hosts in turn. auto
    stands for all GPUs of this machine, or cpu if it has none; the run records those that it took."""
    tier: Literal["auto", "eager", "native", "compiled", "graph"] = "auto"
    """Execution of training steps: eager, operator by operator; native, whole epochs in Esper's own compiled code for
    the CPU, in float32, equal to eager up to rounding; compiled, with the host's segments compiled by torch.compile,
    equal to eager up to rounding; graph, captured once as a CUDA graph and replayed without Python, bit-identical to
    eager. auto takes graph on CUDA and native on the CPU, but never compiled, which on a CPU takes half a minute or
    more before the first step and made steps slower (docs/step.md). A host that has no such form stays eager, and the
    run reports the reason."""
    lanes: Count | None = None
    """Number of worker threads, which train one env each at a time; None: one per core that may be used. No effect on a
    GPU. Results do not depend on it."""

    @property
    def learns(self) -> bool:
        """True if the controller learns during the run."""
        return ControllerSpec.of(self.controller).learns


class GateConfig(Section):
    level: Literal["permissive", "strict"] = "permissive"
    """Checks that gates require: strict adds those marked so, and its G2 tolerates no drop in trial accuracy."""
    min_training_epochs: Count | None = None
    """G2: min epochs in TRAINING; None: max(2, T/15)."""
    min_gradient_health: Fraction = 0.7
    """G2: min gradient health of the seed, 0 to 1."""
    min_gradient_ratio: NonNegative = 0.10
    """G2, strict: min ratio of the seed's to the host's gradient, both per element."""
    trial_standard_errors: NonNegative = 1.0
    """G2, permissive: max drop of the trial accuracy below the accuracy without the seed, in paired standard errors."""
    vanishing_weight: Fraction = 0.5
    """Gradient health lost if all gradient tensors of the seed vanish: their norm is below 1e-7, a constant."""
    exploding_weight: Fraction = 0.8
    """Gradient health lost if all of them explode, see task.exploding_gradient."""
    gradient_ratio_decay: Fraction = 0.9
    """Weight of the past, per epoch, in the moving average of the gradient ratio."""
    min_blending_epochs: Count | None = None
    """G3, strict: min epochs in BLENDING; None: max(2, T/15)."""
    min_contribution: Finite = 1.0
    """G5, strict: min contribution, pp."""
    contribution_standard_errors: NonNegative = 1.64
    """G5, strict: min contribution in paired standard errors."""


class EnvConfig(Section):
    n_envs: Length | None = None
    """Number of hosts trained together; None takes the task's default."""
    episode_length: Length | None = None
    """Epochs of one episode, T; None takes the task's default."""
    edits_per_epoch: Count = 1
    """Decisions other than WAIT that a controller may take before an epoch is trained, at most one in a slot. With 1,
    every decision is followed by an epoch. With more, those before the last return at once, and WAIT trains."""
    max_seeds: Count = 3
    """Max living seeds (GERMINATED to HOLDING) in one host."""
    max_fossils: Count | None = None
    """Max fossils in one host, those that were merged included; None: one per slot, and any number that are merged."""
    parameter_budget: Positive = 10.0
    """Max parameters that seeds may add, as a multiple of the host's."""
    flop_budget: Positive | None = None
    """Max floating-point operations that seeds may add to a forward pass, as a multiple of the host's; None: no
    limit."""
    slots: Names | None = None
    """Slots that a run uses, of those that the task's hosts can have: names, a row ("r2"), a column ("c0") or "all";
    None: the task's default, for custom tasks the slots that their hosts have by themselves."""
    blueprints: Names | None = None
    """Blueprints that a controller may choose from, in this order; None: all of the host's topology but the large
    widenings, widen_x4, widen_x8 and widen_x16."""
    one_incubating: bool = True
    """Allow GERMINATE only while no seed is in GERMINATED, TRAINING or cooldown in that host."""
    auto_advance: Annotated[frozenset[Literal["G1", "G2", "G3"]], Listed] = frozenset()
    """Gates that open automatically; ADVANCE is then masked out for their stage."""
    counterfactual_every: Count | None = None
    """Epochs between measurements of the costly counterfactuals (each slot alone, and pairs). None: 1; in an
    ``esper.Grower``, they are never measured, and contributions of fossils neither."""
    incubation: Literal["shadow", "ste"] = "shadow"
    """Training signal of a seed in TRAINING: shadow, the loss of an extra pass through the rest of the host with the
    seed at its target alpha; ste (straight-through), the host's own pass, which costs less and is less accurate."""
    at_once: bool | None = None
    """Whether seeds that are zero at birth, such as widenings, and copies of the host's blocks become a part of their
    host in the epoch in which they are planted: kept, at alpha 1, clipped together with the host, and with its weight
    decay. The first kind changes nothing until it has learned, so there is nothing to try; and taking either out later
    would show only how much the host has come to lean on it. False: they are incubated, tried and blended in as all
    others. None: the task's default, false for custom tasks."""
    merge: bool | None = None
    """Merge seeds that have been kept for an epoch into the layers of their host, if they can become a part of them, as
    widenings can: units that are new in two neighbouring layers have weights between them only then. Their slots are
    free again, so that a layer may grow several times. None: true with the advisor as the controller, or else false."""
    baseline_episodes: Count = 8
    """Number of hosts without seeds whose mean curve is the no-growth baseline."""
    min_prune_age: Count | None = None
    """Min age of a seed that may be pruned, in epochs; None: max(1, T/30)."""
    embargo: Count | None = None
    """Epochs in EMBARGOED after a prune; None: max(1, T/30)."""
    max_training_epochs: Count | None = None
    """With automatic G2, a seed that has not passed after this many epochs is pruned; None: max(4, T/5)."""
    stop_on: Annotated[frozenset[Literal["divergence", "plateau"]], Listed] = frozenset()
    """Conditions that end an episode before its horizon, as truncation. divergence: any panic of the governor; the
    rollback and its penalty come first, and the episode stops with the restored host. plateau: the best validation
    accuracy so far is at most plateau_margin above its value plateau_epochs epochs ago, no seed is living, and no loss
    is anomalous. The end of the horizon, and the rollback that ends the episode, remain terminations."""
    plateau_epochs: Count | None = None
    """Length of a plateau in epochs; None: max(3, T/5)."""
    plateau_margin: NonNegative = 0.5
    """Max rise of the best accuracy over a plateau, pp."""
    need_every: Annotated[int, Field(ge=0, lt=2**31, strict=True)] = 0
    """Epochs between measurements of the need of vacant slots: how much of the loss the layer there cannot lower by its
    own weights (``esper.hosts.need``). 0: never, since on the tiny hosts of `digits` a measurement takes as long as
    1.5 epochs of training; it is about one batch on larger ones."""
    gates: GateConfig = GateConfig()


class RewardConfig(Section):
    mode: RewardMode = "shaped"
    """Set of terms that make up the reward."""
    gamma: Fraction = 0.995
    """Discount in the potential terms; the agent's discount must be the same."""
    benefit_scale: Positive = 10.0
    """Accuracy gain over the no-growth baseline that is worth 1, pp."""
    loss_benefit_scale: Positive = 5.0
    """Modes `loss_*`: decrease of the validation loss below the no-growth baseline that is worth 1, in standard
    deviations of the baseline's final loss. On `digits` a grown host gains 2.6 of them, worth 0.5, and 3.8 pp, worth
    0.4."""
    price: NonNegative = 1.0
    """Mode `priced`: accuracy that a doubling of the parameters has to bring, pp."""
    rent_in: Literal["parameters", "flops"] = "parameters"
    """The size that seeds pay rent for: parameters, or floating-point operations of a forward pass."""
    rent_rate: NonNegative = 0.05
    """Weight of the rent on alpha-weighted added parameters. On a well-trained host of `digits` a seed is worth 1 to 2
    pp, 0.1 to 0.2 in rewards, and a convolution costs 0.02."""
    rent_cap: NonNegative = 0.6
    """Max rent of a whole episode."""
    rent_host_floor: Count = 200
    """Hosts with fewer parameters pay rent as if they had this many. No effect if rent is paid in flops."""
    stage_potential: NonNegative = 0.1
    """Weight of the stage potential."""
    stage_potentials: Annotated[tuple[Finite, ...], Field(min_length=5, max_length=5)] = (1.0, 2.0, 3.5, 5.5, 6.0)
    """Stage potential Φ of GERMINATED, TRAINING, BLENDING, HOLDING and FOSSILIZED; 0 in other stages."""
    stage_dwell: Count | None = None
    """Epochs in which the potential of a stage rises towards that of the next; None: max(2, T/15)."""
    stage_climb: Fraction = 0.9
    """Part of the way to the next stage's potential that it rises by then."""
    contribution_potential: NonNegative = 0.05
    """Weight of the contribution potential, per pp."""
    loss_contribution_potential: NonNegative = 0.1
    """Modes `loss_*`: weight of the contribution potential, per standard deviation of the baseline's final loss; half
    of what the same gain is worth at termination, as in the other modes."""
    germinate_cost: NonNegative = 0.015
    """Cost of GERMINATE."""
    refused_cost: NonNegative = 0.01
    """Cost of an ADVANCE or FOSSILIZE that its gate refused."""
    action_cost: NonNegative = 0.001
    """Cost of any other action except WAIT."""
    rollback_penalty: NonNegative = 10.0
    """Cost of a rollback."""
    sparse_parameter_cost: NonNegative = 0.1
    """Modes `sparse` and `loss_sparse`: cost of fossils that use the whole parameter budget."""


class GovernorConfig(Section):
    snapshot_every: Count | None = None
    """Epochs between snapshots of a healthy host; None: max(1, T/30)."""
    window: Count | None = None
    """Number of recent healthy validation losses to compare with; None: max(5, 20 T/150)."""
    collapse_loss: Positive = 0.935
    """Collapse: a validation loss at or above this multiple of chance, after a healthy recent mean. Chance is
    ln(classes) for cross-entropy, and otherwise the loss of the untrained host."""
    healthy_loss: Positive = 0.6
    """Collapse: a recent mean loss below this multiple of chance is healthy."""
    divergence_sigma: Positive = 6.0
    """Divergence: the loss is more than this many standard deviations above the recent mean."""
    divergence_ratio: Positive = 1.5
    """Divergence: the loss is also above this multiple of the recent mean."""
    divergence_margin: Positive = 0.25
    """Divergence: the loss is also above the best recent loss by more than this multiple of chance."""
    divergence_checks: Count = 3
    """Divergence: number of consecutive checks in which all three hold, and training does not improve, before a
    rollback."""
    max_rollbacks: Count = 3
    """Max rollbacks in an episode; the last of them ends it."""


class TrainingConfig(Section):
    """The whole configuration of a run; each section is a TOML table."""

    run: RunConfig = RunConfig()
    task: TaskConfig = TaskConfig()
    env: EnvConfig = EnvConfig()
    reward: RewardConfig = RewardConfig()
    governor: GovernorConfig = GovernorConfig()
    heuristic: HeuristicConfig = HeuristicConfig()
    plateau: PlateauConfig = PlateauConfig()
    need: NeedConfig = NeedConfig()
    ppo: PPOConfig = PPOConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    track: TrackConfig = TrackConfig()
    anomaly: AnomalyConfig = AnomalyConfig()

    @model_validator(mode="after")
    def _loss_has_a_unit(self) -> Self:
        if self.reward.mode.startswith("loss_") and self.env.baseline_episodes < 2:
            raise ValueError(
                f"reward.mode = {self.reward.mode!r} divides losses by the standard deviation of the baseline's final "
                f"loss over its hosts: env.baseline_episodes must be 2 or more, not {self.env.baseline_episodes}"
            )
        return self

    @model_validator(mode="after")
    def _need_is_measured(self) -> Self:
        if self.run.controller == "need" and not self.env.need_every:
            raise ValueError(
                "run.controller is need, which plants by what env.need_every measures: set it to 1 or more"
            )
        return self

    @classmethod
    def parse(cls, tables: dict[str, Any]) -> Self:
        """Validates nested ``tables``. Raises ConfigError that lists wrong keys and values with what would be right."""
        try:
            return cls.model_validate(tables)
        except ValidationError as error:
            wrong = [_explain(cls, problem) for problem in error.errors()]
            more = [f"and {len(wrong) - MAX_PROBLEMS} problems more"] if len(wrong) > MAX_PROBLEMS else []
            raise ConfigError("\n".join(wrong[:MAX_PROBLEMS] + more)) from None

    def with_values(self, **sections: dict[str, Any]) -> Self:
        """Returns a copy with some values replaced: ``config.with_values(run={"seed": 3})``. Raises ConfigError."""
        return self.parse(self.tables_with(sections))

    def with_defaults(self, **sections: Mapping[str, Any]) -> Self:
        """Returns a copy with these values, by section and name, where the config has defaults. Raises ConfigError."""
        default = TrainingConfig().model_dump()
        given = self.model_dump()
        chosen: dict[str, dict[str, Any]] = {}
        for section, values in sections.items():
            chosen[section] = {}
            for name, value in values.items():
                if given[section][name] == default[section][name]:
                    chosen[section][name] = value
        return self.with_values(**chosen)

    def tables_with(self, sections: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Returns the config as nested tables, with the values of ``sections`` replaced.

        Values that nobody has set are left out, so that a copy does not count as a config that sets them.
        """
        tables = self.model_dump(exclude_unset=True)
        names = type(self).model_fields
        return {name: {**tables.get(name, {}), **sections.get(name, {})} for name in names}

    def to_toml(self) -> str:
        """Returns the config as TOML that :func:`read_toml` can read; values that are None are omitted."""
        return toml_text(self.model_dump(mode="json", exclude_none=True))


@dataclass(frozen=True)
class Durations:
    """Durations in epochs for an episode of T epochs; those that are None in the config scale with T, rounded up."""

    min_training_epochs: int
    min_blending_epochs: int
    min_prune_age: int
    embargo: int
    max_training_epochs: int
    stage_dwell: int
    snapshot_every: int
    governor_window: int
    plateau_epochs: int

    @classmethod
    def of(cls, config: TrainingConfig, horizon: int) -> Durations:
        def scaled(given: int | None, least: int, fraction: float) -> int:
            return given if given is not None else max(least, math.ceil(fraction * horizon - 1e-9))

        env, gates, governor = config.env, config.env.gates, config.governor
        return cls(
            min_training_epochs=scaled(gates.min_training_epochs, 2, 1 / 15),
            min_blending_epochs=scaled(gates.min_blending_epochs, 2, 1 / 15),
            min_prune_age=scaled(env.min_prune_age, 1, 1 / 30),
            embargo=scaled(env.embargo, 1, 1 / 30),
            max_training_epochs=scaled(env.max_training_epochs, 4, 1 / 5),
            stage_dwell=scaled(config.reward.stage_dwell, 2, 1 / 15),
            snapshot_every=scaled(governor.snapshot_every, 1, 1 / 30),
            governor_window=scaled(governor.window, 5, 20 / 150),
            plateau_epochs=scaled(env.plateau_epochs, 3, 1 / 5),
        )


def _explain(root: type[BaseModel], problem: Any) -> str:
    """Describes a pydantic error in one line: the key, what is wrong, what would be right."""
    if problem["type"] == "value_error":
        return str(problem["ctx"]["error"])
    location = [str(part) for part in problem["loc"]]
    if problem["type"] != "extra_forbidden":
        return f"{'.'.join(location)}: {problem['msg']}, not {_shown(problem['input'])}"
    path = ".".join(location)
    section: Any = root
    for part in location[:-1]:
        section = section.model_fields[part].annotation
    place = ".".join(location[:-1]) or "the config"
    similar = did_you_mean(location[-1], section.model_fields)
    return f"unknown key {path}{similar}; {place} has: {', '.join(section.model_fields)}"


def _shown(value: Any) -> str:
    """Returns the repr of a value, cut to fit in a line."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer with too many digits, or too deep nesting
        return f"this {type(value).__name__}"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
