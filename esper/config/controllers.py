"""Sections about controllers: the hand-written rules, and the agent."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from esper.config.types import Count, Device, Finite, Fraction, NonNegative, Positive, Section


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


class NeedConfig(Section):
    """Settings of the controller `need`, which takes all others from `heuristic`."""

    threshold: NonNegative = 0.3
    """Min need of a slot in which a seed is planted, as a share of the loss of a guess. Around it, doubling a layer of
    `digits` gained 0.1 to 0.8 pp, and more above it (benchmarks/results/need.md)."""


class PPOConfig(Section):
    """Settings of the learning agent (PPO, Schulman et al. 2017)."""

    learning_rate: Positive = 1e-3
    """Adam's learning rate at the start of training."""
    adam_eps: Positive = 1e-5
    """Adam's epsilon."""
    anneal: bool = True
    """Whether the learning rate falls linearly to zero over training."""
    gamma: Fraction = 0.995
    """Discount; the reward's potential terms use the same."""
    gae_lambda: Fraction = 0.97
    """λ of generalised advantage estimation."""
    clip: Positive = 0.2
    """ε: the probability ratio is clipped to 1 ± this."""
    value_clip: Positive | None = None
    """Clips the change of a value to plus and minus this, in units of scaled rewards; None does not clip."""
    value_coefficient: NonNegative = 0.5
    """Weight of the value loss."""
    entropy_start: NonNegative = 0.05
    """Weight of the entropy bonus at the start of training; linear to entropy_end."""
    entropy_end: NonNegative = 0.001
    """Weight of the entropy bonus at the end of training."""
    prior: NonNegative = 1.0
    """Strength of the untrained policy's preference for advancing seeds and leaving them alone; 0: all ops and target
    alphas are equally likely, and the agent often learns to plant nothing."""
    prior_advance: Finite = 1.0
    """Initial logit of ADVANCE, times the prior's strength; those of WAIT and GERMINATE are 0."""
    prior_fossilize: Finite = 2.0
    """The same for FOSSILIZE."""
    prior_prune: Finite = -3.0
    """The same for PRUNE."""
    prior_retarget: Finite = -1.0
    """The same for SET_ALPHA_TARGET."""
    prior_full_alpha: Finite = 3.0
    """Initial logit of a target alpha of 1, which alone can be kept, times the prior's strength; of others: 0."""
    validate_every: Count = 5
    """Rounds between validations of the greedy agent, on hosts that it does not learn from; there is one after the last
    round, too. The agent with the best mean return there is compared and saved. A run of no more rounds has none: there
    is one agent to choose from."""
    group: Count | None = None
    """Number of consecutive envs in a group, which play one context in the task `varied`. The mean return of the others
    is subtracted from each return, as in REINFORCE with a leave-one-out baseline (Kool et al. 2019). None: 4 in that
    task if env.n_envs is a multiple of it, otherwise 1: no groups."""
    cloning_rounds: Annotated[int, Field(ge=0, lt=2**31, strict=True)] = 0
    """Number of rounds at the start in which the advisor acts and the agent learns to act as it does (behaviour
    cloning), before it learns from rewards. In the task `varied` each of their episodes has a context of its own."""
    episodes_per_update: Count | None = None
    """Number of episodes per update, a multiple of n_envs; None: n_envs, one round."""
    n_minibatches: Count = 4
    """Number of parts into which the envs of a rollout are split; sequences stay whole."""
    update_epochs: Count = 4
    """Number of passes over each rollout."""
    target_kl: Positive = 0.02
    """Target KL divergence of the policy in one update."""
    kl_stop: Positive = 1.5
    """An update stops when the KL divergence on a minibatch exceeds this multiple of target_kl."""
    max_grad_norm: Positive = 0.5
    """Max global L2 norm of the agent's gradient."""
    observation_warm_updates: Count = 100
    """Number of updates in which the statistics of observations and returns are cumulative; later they are moving
    averages."""
    observation_decay: Fraction = 0.99
    """Weight of the past in these moving averages."""
    observation_clip: Positive = 10.0
    """Normalised observations are clipped to plus and minus this."""
    reward_std_floor: Positive = 0.1
    """Rewards are divided by the standard deviation of discounted returns, or by this if it is larger."""
    healthy_gradients: tuple[Positive, Positive] = (0.01, 100.0)
    """Reported health of the agent's gradient: 1 if its norm is between these two, and falling to 0 two decades
    outside."""
    reward_clip: Positive = 10.0
    """Scaled rewards are clipped to plus and minus this."""
    device: Device = "cpu"
    """Device of the agent; it is small, and the env's observations are on the CPU."""
    width: Count = 128
    """Number of units of the trunk and of the LSTM."""
