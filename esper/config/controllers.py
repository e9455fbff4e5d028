"""The sections of the config about controllers that do not learn by gradients: two hand-written rules and `plans`."""

from __future__ import annotations

from esper.config.types import Count, Fraction, NonNegative, Positive, Section


class HeuristicConfig(Section):
    """Settings of the controller `heuristic`; shares are of the episode."""

    size: Fraction = 0.8
    """Blueprint that is planted first: its place among all, from the smallest, 0, to the largest, 1."""
    trial_errors: NonNegative = 0.0
    """A seed is blended when its trial is above this many of its standard errors."""
    hopeless_errors: NonNegative = 3.0
    """A seed that has been in TRAINING for as long as G2 requires is removed when its trial is below zero by more than
    this many of its standard errors."""
    rival_errors: NonNegative = 1.0
    """While several seeds have been in TRAINING for as long as G2 requires, those whose trial is not above this many of
    its standard errors are removed."""
    patience: Fraction = 0.16
    """Max share that a seed without a clear gain stays in TRAINING or HOLDING, at least as long as G2 requires. The
    rule then removes a seed in TRAINING, and keeps one in HOLDING if it contributes at all."""
    min_contribution: NonNegative = 0.5
    """A seed is kept at once if it contributes more than this, pp, and more than contribution_errors."""
    contribution_errors: NonNegative = 1.0
    """The same in standard errors. A seed in HOLDING whose contribution is negative by more than this is removed at
    once."""
    latest: Fraction = 0.7
    """Share of the episode in which seeds are planted: later ones have too little left to learn in."""
    ramp: Positive = 1 / 30
    """Share over which alpha rises, rounded to the nearest tempo."""


class PlateauConfig(Section):
    """Settings of the controller `plateau`, which takes all others from `heuristic`; shares are of the episode."""

    window: Fraction = 0.1
    """Length of a plateau: the share over which the best validation accuracy has not risen by more than margin. It
    begins anew when a seed is planted."""
    min_window_epochs: Count = 3
    """The same in epochs, if that is more."""
    margin: NonNegative = 0.5
    """Max rise of the best validation accuracy over a plateau, pp."""


class PlansConfig(Section):
    """Settings of the bandit `plans`; shares are of the episode."""

    ramp: Positive = 1 / 30
    """Share over which alpha rises, rounded to the nearest tempo."""
    patience: Fraction = 1 / 3
    """A seed that waits for its gate for longer than this share is given up, whether incubating or blended. It goes
    early, because a host that leans on it needs time to recover."""
    life: Fraction = 1 / 5
    """Share that a seed needs from planting to keeping; nothing is planted when less is left."""
    min_life_epochs: Count = 7
    """The same in epochs, if that is more."""
    blend: Fraction = 2 / 15
    """Share that a seed needs from the start of blending to keeping; nothing is blended when less is left, since a seed
    that is blended and not kept is a loss."""
    min_blend_epochs: Count = 4
    """The same in epochs, if that is more."""
