"""Settings of what a run records, of trackers, which show a run in addition to its folder, and of warnings."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from esper.config.types import Count, Finite, Fraction, NonNegative, Positive, Section, listed

Tracker = Literal["tensorboard", "wandb", "trackio"]


class TelemetryConfig(Section):
    """Events of a run. No level changes a bit of what is learned."""

    level: Literal["minimal", "normal", "debug"] = "normal"
    """Detail of what is recorded. minimal: rounds, updates of the agent, warnings and the result; normal: also every
    host's actions, gates, stages and epochs; debug: also the decisions to WAIT, and the phases of a step as ranges in
    profiler traces (torch.profiler and, with CUDA, NVTX)."""

    @property
    def of_hosts(self) -> bool:
        """True if the events of single hosts are recorded."""
        return self.level != "minimal"

    @property
    def debug(self) -> bool:
        return self.level == "debug"


class TrackConfig(Section):
    """Trackers that show a run. They cannot stop or change it: a tracker that fails is dropped and reported."""

    to: tuple[Tracker, ...] = ()
    """Trackers of the run: tensorboard (files in the run folder, `tensorboard --logdir runs`); wandb or trackio, in a
    Python program that has an active run of theirs."""

    @field_validator("to", mode="before")
    @classmethod
    def _names(cls, given: Any) -> Any:
        """Splits a comma-separated string, as in `--set track.to=tensorboard`, and drops duplicates."""
        given = listed(given)
        named = isinstance(given, (list, tuple)) and all(isinstance(name, str) for name in given)
        return tuple(dict.fromkeys(given)) if named else given


class AnomalyConfig(Section):
    """Thresholds for warnings about updates of the agent. They do not affect learning."""

    ratio_high: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 20.0
    """Warn if an update makes an action more than this many times likelier; healthy updates reached 8 times."""
    ratio_low: Annotated[float, Field(gt=0, lt=1)] = 0.01
    """Warn if an update leaves an action less than this fraction of its probability."""
    entropy: Fraction = 0.003
    """Warn if a head's mean normalised entropy, over the steps in which it has a choice, is below this: it is nearly
    certain."""
    entropy_until: Fraction = 0.5
    """Low entropy is reported only in this first fraction of all rounds; later it may be normal."""
    min_choices: Count = 32
    """Min choices in a rollout for a warning: of a head for its entropy, of the op for the critic and the gradient."""
    critic_after: Annotated[int, Field(ge=0, strict=True)] = 3
    """Number of first rounds without warnings about the critic, which has not learned yet. With `ppo.group` there are
    none."""
    target_spread: NonNegative = 0.1
    """Min standard deviation of the critic's targets for a warning about it, in units of scaled rewards."""
    value_spread: NonNegative = 0.05
    """Warn if the standard deviation of the critic's values is below this multiple of that of its targets."""
    explained_variance: Finite = -1.0
    """Warn if the critic's explained variance is below this; below 0, the mean of the targets would predict better."""
    gradient_small: NonNegative = 1e-4
    """Warn if the mean gradient norm is below this: the agent learns nothing."""
    gradient_large: Positive = 40.0
    """Warn if the mean gradient norm is above this multiple of `ppo.max_grad_norm`: clipping leaves little but its
    direction."""
