"""Every parameter of a run, in one frozen tree of sections; a docstring under each field is its manual.

``None`` means "from the task" (sizes and rates) or "scaled with the horizon" (durations);
``esper.data.task.resolve`` and :class:`Durations` turn them into numbers. Names of tasks, controllers and blueprints
are checked where their registries are known: when an env or an experiment is made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, ValidationError, model_validator

from esper.config_files import ConfigError as ConfigError
from esper.config_files import read_toml as read_toml
from esper.config_files import set_dotted as set_dotted
from esper.config_files import toml_text
from esper.config_telemetry import AnomalyConfig as AnomalyConfig
from esper.config_telemetry import TrackConfig as TrackConfig
from esper.config_types import Count, Finite, Fraction, Listed, Multiples, Names, NonNegative, Positive, Section

Precision = Literal["auto", "float32", "bfloat16", "float16"]
RewardMode = Literal["shaped", "simplified", "advantage", "sparse", "loss_shaped", "loss_sparse"]

MOST_PROBLEMS = 5
"""That an error tells of."""
MOST_SHOWN = 200
"""Characters of a value that is refused."""


class RunConfig(Section):
    seed: Annotated[int, Field(ge=0, lt=2**31, strict=True)] = 0
    """Seed of everything random in the run."""
    controller: str = "ppo"
    """What decides: ppo (an agent that learns), checkpoint:PATH (one that has learned), pretrained (the one that
    ships), schedule (the one that ships for the task), schedule:FILE.toml, heuristic, random or none."""
    rounds: Count | None = None
    """Rounds of n_envs episodes each; None takes the task's default, which is larger for an agent that learns."""
    evaluation_pairs: Count = 16
    """Hosts on which an agent that has learned is compared with each baseline; it never saw them in training."""
    checkpoint_every: Count = 1
    """Rounds between checkpoints; the last round, an interrupt and an error write one in any case."""
    checkpoint_minutes: Positive = 10.0
    """Minutes after which one is written in the middle of a round, too, at the end of a step."""
    device: str = "cpu"
    """Where hosts train: cpu, cuda, cuda:0, ...; of several GPUs, as cuda:0,cuda:1, hosts take one in turn."""
    tier: Literal["auto", "eager", "compiled", "graph"] = "auto"
    """How steps are carried out: eager, operator by operator; compiled, with the host's segments compiled by
    torch.compile, to the same numbers but for rounding; graph, captured once as a CUDA graph and launched without
    Python, to the same bits as eager. auto takes graph on CUDA and eager elsewhere, never compiled: on a CPU it costs
    half a minute or more before the first step, and made steps slower (docs/performance.md). A host that cannot be
    compiled stays eager, and the run says why."""
    lanes: Count | None = None
    """Envs that train at the same time; None: one a physical core. Results do not depend on it."""
    mark_phases: bool = False
    """Name the phases of a step in profilers' traces: as ranges of torch.profiler and, with CUDA, of NVTX."""

    @property
    def learns(self) -> bool:
        """Whether the controller is one that learns in the run."""
        return self.controller == "ppo"


class TaskConfig(Section):
    name: str = "digits"
    """What hosts are trained on; `esper tasks` lists the known ones, path.py:function names one of your own."""
    data: str | None = None
    """Folder with data that does not come with Esper; None: the environment variable ESPER_DATA, or ~/.cache/esper."""
    download: bool = False
    """Whether data that is missing from that folder may be fetched from the internet."""
    batch_size: Count | None = None
    """Samples in one optimizer step of a host; None takes the task's default."""
    samples_per_epoch: Count | None = None
    """Samples each env draws in one epoch; None takes the task's default. A batch that is not full is left out."""
    learning_rate: Positive | None = None
    """Rate of host and seeds at the start of an episode; None takes the task's default."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """How the rate falls over the episode: cosine to zero, or not at all."""
    momentum: Fraction = 0.9
    """SGD momentum of hosts and seeds."""
    weight_decay: NonNegative = 5e-4
    """SGD weight decay of hosts; seeds have none."""
    precision: Precision | None = None
    """What passes compute with: float32, bfloat16, float16, or auto, which is bfloat16 where the device is good at it
    and float32 elsewhere; None takes the task's default. Weights are float32 in any case."""
    micro_batches: Count = 1
    """Parts that a batch is computed in, one after another, so that less memory is needed; it stays one optimizer step.
    The difference is seen by BatchNorm, whose statistics are those of a part, and by dropout, which draws by the part.
    """
    max_grad_norm: Positive = 1.0
    """Global L2 norm to which the host and each seed are clipped, apart from one another."""


class GateConfig(Section):
    level: Literal["permissive", "strict"] = "permissive"
    """Which checks a gate asks for."""
    min_training_epochs: Count | None = None
    """G2: epochs in TRAINING before blending; None: max(2, T/15)."""
    min_gradient_health: Fraction = 0.7
    """G2: smallest gradient health of the seed, 0 to 1."""
    min_gradient_ratio: NonNegative = 0.10
    """G2, strict: smallest ratio of the seed's to the host's gradient, both per element."""
    trial_standard_errors: NonNegative = 1.0
    """G2, permissive: paired standard errors that the trial accuracy may lie below the accuracy without the seed."""
    gradient_ratio_decay: Fraction = 0.9
    """Weight of the past, per epoch, in the moving average of that ratio."""
    min_blending_epochs: Count | None = None
    """G3, strict: epochs in BLENDING; None: max(2, T/15)."""
    min_contribution: Finite = 1.0
    """G5, strict: smallest contribution, pp."""
    contribution_standard_errors: NonNegative = 1.64
    """G5, strict: how many paired standard errors the contribution must lie above zero."""


class EnvConfig(Section):
    n_envs: Count | None = None
    """Hosts trained together; None takes the task's default."""
    episode_length: Count | None = None
    """Epochs of one episode, T; None takes the task's default."""
    max_seeds: Count = 3
    """Living seeds (GERMINATED to HOLDING) allowed in one host."""
    max_fossils: Count | None = None
    """Fossils allowed in one host; None: one in each slot."""
    parameter_budget: Positive = 10.0
    """Parameters that seeds may add, as a multiple of the host's."""
    blueprints: Names | None = None
    """Blueprints that a controller may choose from, in this order; None: all of the host's topology."""
    one_incubating: bool = True
    """Germinate only while no seed is in GERMINATED, TRAINING or cooldown in that host."""
    auto_advance: Annotated[frozenset[Literal["G1", "G2", "G3"]], Listed] = frozenset()
    """Gates that open by themselves; ADVANCE is then masked out for their stage."""
    counterfactual_every: Count = 1
    """Epochs between measurements of the costly counterfactuals (each slot alone, and pairs)."""
    incubation: Literal["shadow", "ste"] = "shadow"
    """What a seed in TRAINING learns from: the loss of the rest of the host run once more with it at its target alpha,
    or, straight through (ste), the host's own pass, which costs less and is a poorer guide."""
    recalibrate: bool = False
    """Whether each counterfactual configuration is validated under BatchNorm statistics of its own, estimated on the
    first 256 training samples; otherwise all use those gathered in training, with the seeds on."""
    baseline_episodes: Count = 8
    """Hosts left alone whose mean curve is the no-growth baseline."""
    min_prune_age: Count | None = None
    """Epochs a seed must live before it may be pruned; None: max(1, T/30)."""
    embargo: Count | None = None
    """Epochs in EMBARGOED after a prune; None: max(1, T/30)."""
    max_training_epochs: Count | None = None
    """With automatic G2, a seed that has not passed after this many epochs is pruned; None: max(4, T/5)."""
    stop_on: Annotated[frozenset[Literal["divergence", "plateau"]], Listed] = frozenset()
    """What ends an episode before its horizon, as truncation. divergence: a panic of the governor of any kind; the
    rollback and its penalty come first, and the restored host is where it stops. plateau: the best validation accuracy
    so far is at most plateau_margin above what it was plateau_epochs epochs ago, no seed lives, and no loss is
    anomalous. The end of the horizon, and the rollback that ends the episode, stay true ends."""
    plateau_epochs: Count | None = None
    """Epochs that a plateau lasts; None: max(3, T/5)."""
    plateau_margin: NonNegative = 0.5
    """What the best accuracy may rise by in these epochs for it still to be a plateau, pp."""
    gates: GateConfig = GateConfig()


class RewardConfig(Section):
    mode: RewardMode = "shaped"
    """Which terms are paid."""
    gamma: Fraction = 0.995
    """Discount in the potential terms; the agent's discount must be the same."""
    benefit_scale: Positive = 10.0
    """Accuracy gained over the no-growth baseline that is worth 1, pp."""
    loss_benefit_scale: Positive = 5.0
    """Modes `loss_*`: validation loss gained over the no-growth baseline that is worth 1, in standard deviations of
    the baseline's final loss. On `digits` a grown host gains 2.6 of them and 3.8 pp: 0.5 and 0.4."""
    rent_rate: NonNegative = 0.2
    """Weight of the rent on alpha-weighted added parameters."""
    rent_cap: NonNegative = 0.6
    """Largest rent of a whole episode."""
    rent_host_floor: Count = 200
    """Hosts with fewer parameters pay rent as if they had this many."""
    stage_potential: NonNegative = 0.1
    """Weight of the stage potential."""
    contribution_potential: NonNegative = 0.05
    """Weight of the contribution potential, per pp."""
    loss_contribution_potential: NonNegative = 0.1
    """Modes `loss_*`: weight of the contribution potential, per standard deviation of the baseline's final loss; half
    of what the same gain is worth in the end, as in the other modes."""
    germinate_cost: NonNegative = 0.015
    """Cost of GERMINATE."""
    refused_cost: NonNegative = 0.01
    """Cost of an ADVANCE or FOSSILIZE that its gate refused."""
    action_cost: NonNegative = 0.001
    """Cost of any other action but WAIT."""
    rollback_penalty: NonNegative = 10.0
    """Cost of a rollback."""
    sparse_parameter_cost: NonNegative = 0.1
    """Modes `sparse` and `loss_sparse`: cost of fossils that fill the whole parameter budget."""


class GovernorConfig(Section):
    snapshot_every: Count | None = None
    """Epochs between snapshots of a healthy host; None: max(1, T/30)."""
    window: Count | None = None
    """Healthy validation losses remembered; None: max(5, 20 T/150)."""
    collapse_loss: Positive = 0.935
    """Collapse: validation loss at or above this multiple of chance, ln(classes) ..."""
    healthy_loss: Positive = 0.6
    """... after the recent mean was below this multiple of chance."""
    divergence_sigma: Positive = 6.0
    """Divergence: standard deviations above the recent mean, and ..."""
    divergence_ratio: Positive = 1.5
    """... multiple of the recent mean, and ..."""
    divergence_margin: Positive = 0.25
    """... multiple of chance above the recent best loss ..."""
    divergence_checks: Count = 3
    """... in this many checks running."""
    max_rollbacks: Count = 3
    """The rollback that ends the episode."""


class PPOConfig(Section):
    """The agent that learns (Schulman et al. 2017), and how."""

    learning_rate: Positive = 1e-3
    """Adam's rate at the start of training."""
    adam_eps: Positive = 1e-5
    """Adam's epsilon."""
    anneal: bool = True
    """Whether the rate falls linearly to zero over training."""
    gamma: Fraction = 0.995
    """Discount; the reward's potential terms use the same."""
    gae_lambda: Fraction = 0.97
    """λ of generalised advantage estimation."""
    clip: Positive = 0.2
    """ε: how far the probability ratio may leave 1."""
    value_clip: Positive | None = None
    """How far a value may move from what it was, in units of scaled rewards; None does not clip."""
    value_coefficient: NonNegative = 0.5
    """Weight of the value loss."""
    entropy_start: NonNegative = 0.05
    """Weight of the entropy bonus at the start of training ..."""
    entropy_end: NonNegative = 0.01
    """... and at its end, and all through the rounds that follow practice; linear in between."""
    prior: NonNegative = 1.0
    """How strongly the untrained policy prefers to carry seeds through and to let them be; 0: every op and every target
    alpha is as likely as any other, and what is learned from that is often to plant nothing."""
    practice_steps: Annotated[int, Field(ge=0, strict=True)] = 200_000
    """Steps of simulated hosts that an agent practises on before it meets real ones; 0: none. Planted hosts are
    simulated themselves, and are met without practice."""
    practice_lengths: Multiples = (0.4, 0.7, 1.0, 2.0)
    """Lengths of practised episodes, in turn, as multiples of the run's: so that the agent can play other lengths."""
    practice_envs: Count = 64
    """Simulated hosts that are played together in practice."""
    practice_worth: NonNegative = 3.0
    """Practice: mean worth of a seed, pp ..."""
    practice_worth_std: NonNegative = 3.0
    """... and its standard deviation over hosts, slots and blueprints."""
    practice_noise: NonNegative = 1.0
    """Practice: standard deviation of a measured accuracy, pp; that of a few hundred validation images."""
    practice_paired_noise: NonNegative = 1.0
    """Practice: standard deviation of a measured contribution or trial, pp."""
    practice_reliance: NonNegative = 15.0
    """Practice: what accuracy falls by when a ripe seed is switched off, beside what it adds, pp; that of a host whose
    normalisation was trained with its seeds."""
    episodes_per_update: Count | None = None
    """Episodes that an update learns from, a multiple of n_envs; None: n_envs, one round."""
    n_minibatches: Count = 4
    """Parts that the envs of a rollout are split into; sequences stay whole."""
    update_epochs: Count = 4
    """Passes over each rollout."""
    target_kl: Positive = 0.02
    """The KL divergence that an update may move the policy by."""
    kl_stop: Positive = 1.5
    """An update stops when a minibatch's divergence is above this multiple of the target."""
    max_grad_norm: Positive = 0.5
    """Global L2 norm that the agent's gradient is clipped to."""
    observation_warm_updates: Count = 100
    """Updates in which the statistics of observations and returns are cumulative; later ones are a moving average
    with ..."""
    observation_decay: Fraction = 0.99
    """... this weight of what was known before."""
    observation_clip: Positive = 10.0
    """Normalised observations are clipped to plus and minus this."""
    reward_std_floor: Positive = 0.1
    """Rewards are divided by the standard deviation of discounted returns, or by this where it is smaller."""
    reward_clip: Positive = 10.0
    """Scaled rewards are clipped to plus and minus this."""
    device: str = "cpu"
    """Where the agent lives; it is small, and at home beside the env's observations."""
    width: Count = 128
    """Units of the trunk and of the LSTM."""


class TrainingConfig(Section):
    """The whole configuration of a run; one TOML table a section."""

    run: RunConfig = RunConfig()
    task: TaskConfig = TaskConfig()
    env: EnvConfig = EnvConfig()
    reward: RewardConfig = RewardConfig()
    governor: GovernorConfig = GovernorConfig()
    ppo: PPOConfig = PPOConfig()
    track: TrackConfig = TrackConfig()
    anomaly: AnomalyConfig = AnomalyConfig()

    @model_validator(mode="after")
    def _loss_is_measured_in_something(self) -> Self:
        if self.reward.mode.startswith("loss_") and self.env.baseline_episodes < 2:
            raise ValueError(
                f"reward.mode = {self.reward.mode!r} measures losses in the standard deviation over the no-growth "
                f"hosts: env.baseline_episodes must be 2 or more, not {self.env.baseline_episodes}"
            )
        return self

    @classmethod
    def parse(cls, tables: dict[str, Any]) -> TrainingConfig:
        """A checked config from nested dicts. Raises ConfigError naming each wrong key with what would be right."""
        try:
            return cls.model_validate(tables)
        except ValidationError as error:
            wrong = [_explain(cls, problem) for problem in error.errors()]
            more = [f"and {len(wrong) - MOST_PROBLEMS} problems more"] if len(wrong) > MOST_PROBLEMS else []
            raise ConfigError("\n".join(wrong[:MOST_PROBLEMS] + more)) from None

    def with_values(self, **sections: dict[str, Any]) -> TrainingConfig:
        """A copy with some values replaced: ``config.with_values(run={"seed": 3})``."""
        tables = self.model_dump()
        for name, values in sections.items():
            tables[name] = {**tables[name], **values}
        return TrainingConfig.parse(tables)

    def to_toml(self) -> str:
        """The config as TOML that :func:`read_toml` reads back; values that are None are left out."""
        return toml_text(self.model_dump(mode="json", exclude_none=True))


@dataclass(frozen=True)
class Durations:
    """Durations in epochs for an episode of T epochs; those not given scale with T and are rounded up."""

    min_training_epochs: int
    min_blending_epochs: int
    min_prune_age: int
    embargo: int
    max_training_epochs: int
    dwell: int
    """Epochs over which the stage potential climbs towards the next stage's."""
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
            dwell=scaled(None, 2, 1 / 15),
            snapshot_every=scaled(governor.snapshot_every, 1, 1 / 30),
            governor_window=scaled(governor.window, 5, 20 / 150),
            plateau_epochs=scaled(env.plateau_epochs, 3, 1 / 5),
        )


def _explain(root: type[BaseModel], problem: Any) -> str:
    """One line for one pydantic error: where, what is wrong, what would be right."""
    if problem["type"] == "value_error":
        return str(problem["ctx"]["error"])
    location = [str(part) for part in problem["loc"]]
    if problem["type"] != "extra_forbidden":
        return f"{'.'.join(location)}: {problem['msg']}, not {_shown(problem['input'])}"
    section: Any = root
    for part in location[:-1]:
        section = section.model_fields[part].annotation
    place = ".".join(location[:-1]) or "the config"
    return f"unknown key {'.'.join(location)}; {place} has: {', '.join(section.model_fields)}"


def _shown(value: Any) -> str:
    """What was given, as far as a line holds it."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer that has too many digits to be written down, a nest
        return f"this {type(value).__name__}"
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def describe_fields(section: type[BaseModel], prefix: str = "") -> list[tuple[str, str, str]]:
    """(dotted name, default, docstring) of every value in the config, for people."""
    rows: list[tuple[str, str, str]] = []
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            rows += describe_fields(field.annotation, f"{prefix}{name}.")
        else:
            default = "from the task or the horizon" if field.default is None else str(field.default)
            rows.append((f"{prefix}{name}", default, (field.description or "").replace("\n", " ")))
    return rows
