"""Where a run is shown beside its folder, and what of it is worth a warning."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from esper.config_types import Count, Finite, Fraction, NonNegative, Positive, Section, listed

Tracker = Literal["tensorboard", "wandb", "trackio"]


class TrackConfig(Section):
    """Where else a run is shown. None of it can slow, stop or change a run: what is too slow loses events, and the
    run says how many."""

    to: tuple[Tracker, ...] = ()
    """What shows the run: tensorboard (files in the run folder, `tensorboard --logdir runs`), wandb, trackio."""
    project: str = "esper"
    """What runs are gathered under in wandb and trackio."""
    queue: Count = 10_000
    """Events that wait for each of them at most; what comes while so many wait is dropped and counted."""
    patience: NonNegative = 10.0
    """Seconds that the end of the run waits for each of them to write what is left."""

    @field_validator("to", mode="before")
    @classmethod
    def _names(cls, given: Any) -> Any:
        """A name, or several with commas between them, as `--set track.to=tensorboard` gives it; each counts once."""
        given = listed(given)
        named = isinstance(given, (list, tuple)) and all(isinstance(name, str) for name in given)
        return tuple(dict.fromkeys(given)) if named else given


class AnomalyConfig(Section):
    """When an update of the agent is worth a warning. Nothing that is learned depends on it."""

    ratio_high: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 20.0
    """An update made an action more than this many times likelier; healthy ones were seen to reach 8 times."""
    ratio_low: Annotated[float, Field(gt=0, lt=1)] = 0.01
    """An update left an action less than this part of its probability; a twentieth is seen in healthy ones."""
    entropy: Fraction = 0.003
    """A head of the policy is as good as certain: its mean normalised entropy, where it chooses, is below this ..."""
    entropy_until: Fraction = 0.5
    """... in this first part of all rounds; later it may well be."""
    least_choices: Count = 32
    """A head is judged by this many choices or more; the critic and the gradient by so many choices of an op."""
    critic_after: Annotated[int, Field(ge=0, strict=True)] = 3
    """Rounds in which the critic is not judged, for it has not learned yet; nor is it where the standard deviation of
    its targets, in units of scaled rewards, is below ..."""
    target_spread: NonNegative = 0.1
    """... this."""
    value_spread: NonNegative = 0.05
    """The critic's values differ less than this multiple of what its targets do, as standard deviations."""
    explained_variance: Finite = -1.0
    """The critic is further from its targets than their mean is: explained variance below this."""
    gradient_small: NonNegative = 1e-4
    """Mean norm of the gradient below which nothing is learned."""
    gradient_large: Positive = 40.0
    """Mean norm of the gradient, as a multiple of `ppo.max_grad_norm`, above which clipping leaves of it no more than a
    direction."""
