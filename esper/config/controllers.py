"""Sections about controllers: two hand-written rules, the bandit `plans`, the agent, and the worths of seeds."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from esper.config.types import Count, Finite, Fraction, Multiples, NonNegative, Positive, Section


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


class ExperienceConfig(Section):
    """Prior of what a seed is worth, see :mod:`esper.core.worth`."""

    worth_std: Positive = 3.0
    """Standard deviation of a seed's worth before anything is known, pp; the run estimates its own."""
    noise: Positive = 2.0
    """Standard deviation of an episode's gain, a trial or a contribution given the worths, pp; likewise."""
    baseline_error: Positive = 0.5
    """Standard deviation of the error of the no-growth accuracy that gains are measured from, pp, and of the loss."""
    max_loss: Positive = 10.0
    """A host that ends further below the hosts left alone than this, in accuracy or by the loss, counts as this far
    below, pp, so that one that collapsed does not count for ten."""
    strength: Positive = 4.0
    """Weight of the guesses ``worth_std`` and ``noise``, in measurements."""
    shared: Fraction = 0.2
    """Part of the variance of worths that all seeds share: whether growing pays."""
    by_blueprint: Fraction = 0.35
    """Part that a blueprint has in all slots."""
    by_slot: Fraction = 0.1
    """Part that a slot has with all blueprints; the rest is each blueprint's own in each slot."""
    slope: NonNegative = 0.5
    """Prior mean of the change in a trial or a contribution per pp of worth."""
    slope_std: Positive = 0.5
    """Standard deviation of that prior."""
    offset_std: Positive = 30.0
    """Prior standard deviation of the part of a contribution that all seeds of a slot share, pp."""
    loss_slope: NonNegative = 1.0
    """Prior mean of the change in the gain by the final loss per pp of summed worths."""
    loss_slope_std: Positive = 0.5
    """Standard deviation of that prior, and of the correction of the unit of worths."""

    @model_validator(mode="after")
    def _own_part(self) -> Self:
        if self.shared + self.by_blueprint + self.by_slot > 0.95:
            raise ValueError(
                "experience: shared + by_blueprint + by_slot must be 0.95 or less, because each blueprint also has a "
                f"worth of its own in each slot; not {self.shared + self.by_blueprint + self.by_slot:g}"
            )
        return self


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
    """Weight of the entropy bonus at the start of training without practice; linear to entropy_end."""
    entropy_end: NonNegative = 0.001
    """Weight of the entropy bonus at the end of practice or training, and in all training after practice, where drawn
    worths do the exploring."""
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
    prior_profit: Finite = 24.0
    """Initial weight of a seed's profit, in standard deviations, in its logit, times the prior's strength."""
    prior_pays: Finite = 6.0
    """Initial weight of whether the most profitable seed pays (±1) in the logit of planting, likewise."""
    prior_full_alpha: Finite = 3.0
    """Initial logit of a target alpha of 1, which alone can be kept, times the prior's strength; of others: 0."""
    practised_rate: Positive = 0.2
    """Learning rate of an agent that has practised, as a multiple of learning_rate. The noisy returns of a few real
    hosts are soon learned, at the price of what many simulated ones have taught."""
    practice_steps: Annotated[int, Field(ge=0, strict=True)] = 8_000
    """Number of env steps that an agent practises on simulated hosts before it trains on real ones; 0: none. The
    planted task, whose hosts are simulated themselves, has no practice."""
    practice_shown: Fraction = 1.0
    """Practice: the first part, in which ``plans`` plays and the agent learns to act likewise. In the rest the agent
    plays."""
    practice_entropy: NonNegative = 0.005
    """Practice: weight of the entropy bonus at its start; linear to entropy_end. It counts when the agent plays."""
    practice_lengths: Multiples = (0.4, 0.7, 1.0, 2.0)
    """Lengths of practice episodes, in turn, as multiples of the run's, so that the agent can play other lengths."""
    practice_envs: Count = 32
    """Number of simulated hosts that are played together in practice."""
    practice_worth: NonNegative = 1.5
    """Practice: mean worth of a seed, pp."""
    practice_worth_std: NonNegative = 2.0
    """Practice: standard deviation of a seed's worth over hosts, slots and blueprints, pp."""
    practice_world_envs: Count = 4
    """Practice: number of simulated hosts that share a world, and with it the worths of seeds and the experience."""
    practice_world_episodes: Count = 8
    """Practice: number of episodes that a world lasts, so that what is practised is to explore and then to exploit."""
    practice_unknown: Annotated[float, Field(ge=1, le=10)] = 2.0
    """Practice: worths as a whole, noise, reliance and the time that seeds need differ between worlds, by factors
    between 1 / practice_unknown and practice_unknown."""
    practice_noise: NonNegative = 1.0
    """Practice: standard deviation of a measured accuracy, pp; typical of a few hundred validation images."""
    practice_paired_noise: NonNegative = 1.0
    """Practice: standard deviation of a measured contribution or trial, pp."""
    practice_healing: Fraction = 0.5
    """Practice: fraction of a loss by a change of alpha that heals in an early epoch."""
    practice_reliance: NonNegative = 15.0
    """Practice: drop of the accuracy when a mature seed is switched off, in addition to what it contributes, pp;
    typical of a host whose normalisation was trained with its seeds."""
    practice_overlap: Fraction = 0.5
    """Practice: max overlap of what a host relies on two seeds for, as a fraction; its size and sign are drawn."""
    validate_every: Count = 5
    """Rounds between validations of the greedy agent, on hosts that it does not learn from; there is one after the last
    round, too. The agent with the best mean return there is compared and saved. A run of no more rounds has none: there
    is one agent to choose from."""
    group: Count | None = None
    """Number of consecutive envs in a group, which play one context in the task `varied`. The mean return of the others
    is subtracted from each return, as in REINFORCE with a leave-one-out baseline (Kool et al. 2019). None: 4 in that
    task if env.n_envs is a multiple of it, otherwise 1: no groups."""
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
    device: str = "cpu"
    """Device of the agent; it is small, and the env's observations are on the CPU."""
    width: Count = 128
    """Number of units of the trunk and of the LSTM."""
