"""Simulated hosts as a backend of the phase loop, under the law of the planted task.

The law gives their accuracy. Accuracies are pp, T is the horizon.

- Host. Alone it reaches ``floor + (ceiling − floor) · (1 − exp(−t / (host_time · T)))`` after t epochs.
- Plasticity. p(t) = (1 + cos(π t / T)) / 2 falls like a learning rate, so that early epochs count more.
- Maturity of a seed: m = 1 − exp(−x / (seed_time · T)). x grows by p per epoch, times alpha once the seed is blended,
  and times ``incubation_rate`` while it is incubated. Germinated and fading seeds do not learn.
- Worth. A seed adds worth[slot][blueprint] · share[operator] · alpha · m. Some worths are negative, and one blueprint
  is clearly the best of each slot. Two seeds of positive worth in neighbouring slots also add synergy · αm · α'm'.
- Shock. A change of alpha by Δ from one epoch to the next costs accuracy: rising_shock · Δ² · (1 − m) if it rises,
  because the seed is immature, and falling_shock · Δ² · m if it falls, because the host relies on the seed. So blending
  too early, pruning a mature seed, and doing either in one jump cost accuracy. The loss heals by healing · p per epoch.
- Reliance. A host relies on its blended seeds: if one is switched off, because its contribution is measured or because
  it was not kept, accuracy falls by r = reliance · αm in addition to what the seed adds. Two that are switched off
  together cost r + r' − o · min(r, r'), with an overlap o of each world between −overlap and overlap.
- Merges. A merged seed is a part of the host: it goes on maturing as a seed at alpha 1, and nothing switches it off. A
  later seed in its slot has ``returns`` times the worth, for each seed merged there before.
- Noise. Measured accuracies have one error per epoch, with standard deviation ``noise``, which is the same for all
  configurations of a host; contributions and trials have their own errors, with standard deviation ``paired_noise``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from esper.core.action import ActionSpec
from esper.core.observation import KINDS
from esper.core.ramps import STYLE_IS_GATED, STYLE_OPERATOR
from esper.core.slots import IS_ON, Bools, Floats, Ints, Slots
from esper.core.stage import SeedStage
from esper.core.state import MIN_STD, Baseline, Choices, EnvState, copied
from esper.env.backend import Backend, Merge
from esper.training.rng import RngStream, derive_seed

T = TypeVar("T")

CHANCE = math.log(10)
"""Loss of a host that guesses among ten classes."""


@dataclass(frozen=True)
class SimParams:
    """Parameters of the law; see the module's docstring. Raises ValueError for lengths that do not match."""

    slots: tuple[str, ...] = ("r0c0", "r0c1", "r0c2")
    blueprints: tuple[str, ...] = ("moss", "fern", "oak", "ivy")
    worth: tuple[tuple[float, ...], ...] = (
        (3.0, 8.0, -4.0, -3.0),
        (-3.0, 3.0, 9.0, -5.0),
        (7.0, -4.0, -5.0, 3.0),
    )
    """Worth of a seed by slot, then blueprint, pp."""
    worth_std: float = 0.0
    """If above 0, every world has its own worths: these plus normal noise with this standard deviation, pp."""
    unknown: float = 1.0
    """If above 1, every world has its own unknowns: its worths as a whole, ``noise``, ``paired_noise``, ``reliance``
    and ``seed_time``, each multiplied by a factor between 1 / unknown and unknown, uniform in its logarithm."""
    world_envs: int | None = None
    """Number of envs in a world; None: worths are drawn for each env and episode, and all share their experience."""
    world_episodes: int | None = None
    """Number of episodes that a world lasts; see :class:`esper.core.gather.Gatherer`."""
    share: tuple[float, float, float] = (1.0, 0.8, 0.9)
    """Fraction of its worth that a seed can reach, by blend operator: add, multiply, gate."""
    synergy: float = 1.0
    parameters: tuple[int, ...] = (100, 300, 600, 400)
    """Number of parameters by blueprint; a gated seed has ``gate_parameters`` more."""
    kinds: tuple[tuple[float, ...], ...] = ()
    """The parts that each blueprint is built of, see ``esper.core.observation.KINDS``; empty: nothing."""
    fits: tuple[tuple[bool, ...], ...] = ()
    """Whether each blueprint can be planted in each slot, by slot; empty: all can be everywhere."""
    at_once: tuple[bool, ...] = ()
    """Whether seeds are a part of their host at once, by blueprint; empty: none is."""
    merges: tuple[bool, ...] = ()
    """Whether kept seeds can become a part of their host's layers, by blueprint; empty: none can."""
    returns: float = 0.6
    """Factor of the worth of a seed for each one that was merged in its slot before."""
    gate_parameters: int = 50
    host_parameters: int = 1000
    flops: tuple[float, ...] = ()
    """Operations of a forward pass by blueprint, a sample; empty: two for each parameter."""
    host_flops: float = 2000.0
    """Operations of a forward pass of the host, a sample."""
    floor: float = 10.0
    ceiling: float = 65.0
    host_time: float = 0.2
    curve: tuple[float, ...] | None = None
    """Accuracy of the host alone by number of epochs, pp; None: from floor, ceiling and host_time."""
    seed_time: float = 0.12
    incubation_rate: float = 0.5
    rising_shock: float = 3.0
    falling_shock: float = 5.0
    healing: float = 0.08
    reliance: float = 0.0
    overlap: float = 0.0
    noise: float = 0.3
    paired_noise: float = 0.3
    spread: float = 0.3
    """Standard deviation of the baseline's final accuracy, pp. It is the unit of loss rewards, and so it does not
    depend on the noise."""

    def __post_init__(self) -> None:
        shape = (len(self.slots), len(self.blueprints))
        if np.shape(self.worth) != shape or len(self.parameters) != shape[1]:
            raise ValueError(f"expected worth of shape {shape} [slots, blueprints] and parameters of length {shape[1]}")

    def only(self, blueprints: tuple[str, ...]) -> SimParams:
        """Returns the law for hosts in which only these blueprints can be planted."""
        places = [self.blueprints.index(name) for name in blueprints]

        def of_these(values: Sequence[T]) -> tuple[T, ...]:
            if not values:  # the default of a field
                return ()
            return tuple(values[place] for place in places)

        return replace(
            self,
            blueprints=blueprints,
            worth=tuple(map(of_these, self.worth)),
            parameters=of_these(self.parameters),
            kinds=of_these(self.kinds),
            at_once=of_these(self.at_once),
            merges=of_these(self.merges),
            flops=of_these(self.flops),
            fits=tuple(map(of_these, self.fits)),
        )

    @property
    def spec(self) -> ActionSpec:
        """The slots, and the blueprints that fit in each."""
        offered = []
        for row in self.fits:
            fitting = tuple(name for name, fits in zip(self.blueprints, row, strict=True) if fits)
            offered.append(fitting)
        return ActionSpec(self.slots, self.blueprints, tuple(offered))

    @property
    def choices(self) -> Choices:
        """The sizes of these hosts and seeds, which are known beforehand."""
        shape = (len(self.slots), len(self.blueprints))
        sizes = np.array(self.parameters) + self.gate_parameters
        # A multiplication and an addition for each parameter.
        flops = np.array(self.flops) if self.flops else 2.0 * sizes
        fits = np.array(self.fits) if self.fits else np.ones(shape, dtype=np.bool_)
        kinds = np.array(self.kinds) if self.kinds else np.zeros((shape[1], len(KINDS)))
        return Choices(
            host_parameters=self.host_parameters,
            host_flops=self.host_flops,
            parameters=np.where(fits, sizes, 0),
            flops=np.where(fits, flops, 0.0),
            kinds=kinds,
        )

    def host_accuracy(self, epoch: Ints, horizon: int) -> Floats:
        """Returns the accuracy of the host alone after ``epoch`` epochs, pp."""
        if self.curve is not None:
            return np.asarray(np.array(self.curve)[epoch])
        risen = 1 - np.exp(-epoch / (self.host_time * horizon))
        return np.asarray(self.floor + (self.ceiling - self.floor) * risen)

    def loss(self, accuracy: Floats) -> Floats:
        """Returns the validation loss at an accuracy: chance at 10 %, falling linearly."""
        return CHANCE * np.maximum(100 - accuracy, 1.0) / 90

    def baseline(self, horizon: int, episodes: int) -> Baseline:
        """Returns the no-growth baseline: curves without seeds and noise, and a standard deviation from ``spread``."""
        accuracy = self.host_accuracy(np.arange(horizon + 1), horizon)
        return Baseline(
            accuracy=tuple(accuracy.tolist()),
            loss=tuple(self.loss(accuracy).tolist()),
            final_loss_std=max(CHANCE * self.spread / 90, MIN_STD),
            episodes=episodes,
        )


@dataclass(frozen=True)
class Accuracies:
    """Accuracies without noise, [E] unless noted, pp."""

    accuracy: Floats
    committed: Floats
    all_off: Floats
    contribution: Floats
    """Contributions of blended seeds, [E, S]."""
    interaction: Floats
    """Interactions of blended seeds with their neighbours, [E, S]."""
    trial: Floats
    """Accuracy that a seed would add at its incubation target, [E, S]."""


class PlantedBackend(Backend):
    """E hosts under a law.

    A host's noise depends on (run seed, env, episode) only, so that adding hosts changes nothing for the others.
    """

    STATE = (
        "worth",
        "experience",
        "trained_alpha",
        "merged_worth",
        "merged_gain",
        "scar",
        "noise",
        "seed_time",
        "reliance",
        "paired_noise",
        "overlap",
    )
    """Names of the arrays that change."""

    def __init__(
        self,
        law: SimParams,
        n_envs: int,
        horizon: int,
        counterfactual_every: int,
    ) -> None:
        self.law = law
        self.counterfactual_every = counterfactual_every
        self.horizon = horizon
        slots = len(law.slots)
        self.only_added = np.zeros(len(law.blueprints), dtype=np.bool_)
        self.at_once = np.array(law.at_once or (False,) * len(law.blueprints), dtype=np.bool_)
        self.worth = np.tile(np.array(law.worth), (n_envs, 1, 1))
        """Worths of seeds, [E, S, B], pp."""
        self.share = np.array(law.share)
        # The unknowns of each env's world, [E, 1].
        self.seed_time = np.full((n_envs, 1), law.seed_time)
        self.reliance = np.full((n_envs, 1), law.reliance)
        self.paired_noise = np.full((n_envs, 1), law.paired_noise)
        self.overlap = np.zeros((n_envs, 1))
        self.experience = np.zeros((n_envs, slots))
        self.trained_alpha = np.zeros_like(self.experience)
        """Alpha in the last trained epoch, [E, S]."""
        self.can_merge = np.array(law.merges or (False,) * len(law.blueprints))
        self.merged_worth = np.zeros_like(self.experience)
        """Worth of all merged seeds of a slot, [E, S], pp; ``merged_gain`` is what they add now."""
        self.merged_gain = np.zeros_like(self.experience)
        self.scar = np.zeros(n_envs)
        """Accuracy lost to shocks and not healed yet, [E], pp."""
        self.noise = np.zeros((n_envs, horizon + 1, 1 + 2 * slots))
        """[E, T + 1, 1 + 2S], pp: errors of the accuracies, the contributions and the trials."""

    def reset(
        self,
        starting: Bools,
        run_seed: int,
        episodes: Ints,
    ) -> None:
        """Starts episodes; draws a whole episode's errors at once, from each env's own stream."""
        law = self.law
        self.experience[starting] = 0.0
        self.trained_alpha[starting] = 0.0
        self.merged_worth[starting] = 0.0
        self.merged_gain[starting] = 0.0
        self.scar[starting] = 0.0
        scale = np.full(self.noise.shape[2], law.paired_noise, dtype=np.float64)
        scale[0] = law.noise
        for env in np.flatnonzero(starting).tolist():
            episode = int(episodes[env])
            draw = np.random.default_rng(derive_seed(run_seed, env, episode, RngStream.NOISE))
            self.noise[env] = draw.standard_normal(self.noise.shape[1:]) * scale
            if law.world_envs is not None:
                draw = self._draw_of_world(run_seed, env // law.world_envs, episode)
            self._draw_unknowns(env, draw)

    def _draw_of_world(
        self,
        run_seed: int,
        world: int,
        episode: int,
    ) -> np.random.Generator:
        """Returns the random numbers that all envs and episodes of a world draw."""
        number = 0
        if self.law.world_episodes:
            # Worlds do not all end in the same episode.
            number = (episode + world) // self.law.world_episodes
        seed = derive_seed(run_seed, world, number, RngStream.EXPERIENCE, 1)
        return np.random.default_rng(seed)

    def _draw_unknowns(self, env: int, draw: np.random.Generator) -> None:
        """Sets what a controller does not know of the world of ``env``."""
        law = self.law
        worth = np.array(law.worth) + law.worth_std * draw.standard_normal(np.shape(law.worth))
        # Factors that are uniform in their logarithm.
        worths, noise, paired, reliance, seed_time = law.unknown ** draw.uniform(-1, 1, 5)
        self.worth[env] = worth * worths
        self.noise[env, :, 0] *= noise
        self.noise[env, :, 1:] *= paired
        self.paired_noise[env] = law.paired_noise * paired
        self.reliance[env] = law.reliance * reliance
        self.seed_time[env] = law.seed_time * seed_time
        self.overlap[env] = law.overlap * draw.uniform(-1, 1)

    def plant(
        self,
        where: Bools,
        blueprint: Ints,
        style: Ints,
    ) -> tuple[Ints, dict[int, str]]:
        self.experience[where] = 0.0
        self.trained_alpha[where & self.at_once[blueprint]] = 1.0  # nothing changes when they are on: no shock
        gates = self.law.gate_parameters * STYLE_IS_GATED[style]
        return np.array(self.law.parameters)[blueprint] + gates, {}

    def merge(self, due: Bools, state: EnvState) -> dict[int, Merge]:
        slots = state.slots
        merged = due & self.can_merge[slots.blueprint]
        worth = self._worth_of(slots)
        self.merged_worth += np.where(merged, worth, 0.0)
        self.merged_gain += np.where(merged, worth * slots.alpha * self.maturity, 0.0)
        self.experience[merged] = 0.0
        self.trained_alpha[merged] = 0.0  # nothing changes: no shock
        choices = self.law.choices
        flops = choices.flops_of(slots)
        merges = {}
        for env in np.flatnonzero(merged.any(axis=1)).tolist():
            of_env = merged[env]
            parameters = of_env * slots.parameters[env]
            operations = of_env * flops[env]
            merges[env] = Merge(of_env, parameters, operations, choices.parameters, choices.flops)
        return merges

    @property
    def maturity(self) -> Floats:
        """Maturity m of seeds, [E, S]."""
        return np.asarray(1 - np.exp(-self.experience / (self.seed_time * self.horizon)))

    def train(self, active: Bools, state: EnvState) -> None:
        law = self.law
        slots = state.slots
        trained = active[:, None]
        # p(t) of the law, which falls from 1 to 0.
        plasticity = (1 + np.cos(np.pi * state.epoch / self.horizon)) / 2
        alpha = slots.alpha_on
        maturity = self.maturity

        # Shocks cost accuracy, which heals.
        change = np.where(trained, alpha - self.trained_alpha, 0.0)
        rising = law.rising_shock * (1 - maturity)
        falling = law.falling_shock * maturity
        shock = np.where(change > 0, rising, falling)
        self.scar *= 1 - law.healing * plasticity * active
        self.scar += (shock * change**2).sum(axis=1)

        # Seeds mature.
        rate = np.where(slots.stage == SeedStage.TRAINING, law.incubation_rate, alpha)
        grown = rate * plasticity[:, None]
        self.experience += np.where(trained & slots.learning, grown, 0.0)
        ripens = 1 - np.exp(-plasticity[:, None] / (self.seed_time * self.horizon))
        self.merged_gain += np.where(trained, (self.merged_worth - self.merged_gain) * ripens, 0.0)
        np.copyto(self.trained_alpha, alpha, where=trained)

    def measure(self, active: Bools, state: EnvState) -> None:
        true = self.true_accuracies(state.slots, state.epoch)
        trained = active & (state.epoch > 0)
        state.write(
            trained,
            train_accuracy=true.accuracy,
            train_loss=self.law.loss(true.accuracy),
        )

        # All networks of a host have the same error in an epoch.
        errors = self.noise[np.arange(len(active)), state.epoch]
        error = errors[:, 0]
        accuracy = np.clip(true.accuracy + error, 0.0, 100.0)
        committed = np.clip(true.committed + error, 0.0, 100.0)
        all_off = np.clip(true.all_off + error, 0.0, 100.0)
        state.write(
            active,
            accuracy=accuracy,
            loss=self.law.loss(accuracy),
            committed=committed,
            committed_loss=self.law.loss(committed),
            all_off=all_off,
            all_off_loss=self.law.loss(all_off),
        )

        first_trial = 1 + len(self.law.slots)
        measured = replace(
            true,
            contribution=true.contribution + errors[:, 1:first_trial],
            trial=true.trial + errors[:, first_trial:],
        )
        self._write_seeds(state, active[:, None], measured)

    def _write_seeds(
        self,
        state: EnvState,
        active: Bools,
        measured: Accuracies,
    ) -> None:
        """Writes what was measured of seeds into the envs of ``active`` [E, 1]."""
        seeds = state.slots
        contribution = measured.contribution
        blended = active & IS_ON[seeds.stage] & (seeds.alpha > 0)
        seeds.epochs_since_measured += active & ~np.isnan(seeds.contribution)
        seeds.write(
            blended,
            contribution_change=contribution - np.nan_to_num(seeds.contribution),
            contribution=contribution,
            contribution_error=self.paired_noise,
            epochs_since_measured=0,
        )

        # A seed that is blended alone interacts with nothing, which costs no measurement to know.
        due = state.epoch % self.counterfactual_every == 0
        alone = blended.sum(axis=1) == 1
        seeds.write(blended & (due | alone)[:, None], interaction=measured.interaction)

        incubating = active & (seeds.stage == SeedStage.TRAINING)
        seeds.write(incubating, trial=measured.trial, trial_error=self.paired_noise)

        # A seed's gradient is large while it has much to learn, and it is always sound.
        immaturity = 1 - self.maturity
        seeds.write(
            active & seeds.learning,
            gradient_norm=immaturity,
            gradient_ratio=immaturity,
            gradient_health=1.0,
            vanishing=0.0,
            exploding=0.0,
        )

    def test_accuracy(self, state: EnvState) -> Floats:
        """Returns the accuracy of each committed network under the law, without noise, pp [E]."""
        return self.true_accuracies(state.slots, state.epoch).committed

    def state_dict(self) -> Any:
        return {name: copied(getattr(self, name)) for name in self.STATE}

    def load_state_dict(self, saved: Any, state: EnvState) -> None:
        for name in self.STATE:
            if name in saved or not name.startswith("merged"):  # earlier versions did not merge
                getattr(self, name)[:] = saved[name].numpy()

    def true_accuracies(self, slots: Slots, epoch: Ints) -> Accuracies:
        """Returns the accuracies under the law after ``epoch`` epochs [E], for all configurations."""
        worth = self._worth_of(slots)
        helpful = worth > 0
        maturity = self.maturity
        realised = slots.alpha_on * maturity
        on_trial = slots.incubation_target * maturity
        # Seeds of positive worth in neighbouring slots help one another.
        pull = self.law.synergy * _neighbours(realised * helpful)
        interaction = realised * helpful * pull

        # The host leans on its blended seeds, and falls if they are switched off: in a committed network, if not kept.
        leaning = self.reliance * realised
        shared = self._shared(leaning)
        kept = np.where(slots.fossil, realised, 0.0)
        unkept = np.where(slots.fossil, 0.0, leaning)

        alone = self.law.host_accuracy(epoch, self.horizon) - self.scar + self.merged_gain.sum(axis=1)
        return Accuracies(
            accuracy=np.clip(alone + self._effect(worth, realised), 0.0, 100.0),
            committed=np.clip(alone + self._effect(worth, kept) - self._lost(unkept), 0.0, 100.0),
            all_off=np.clip(alone - self._lost(leaning), 0.0, 100.0),
            contribution=worth * realised + interaction + leaning,
            interaction=interaction + shared,
            trial=worth * on_trial + helpful * on_trial * pull,
        )

    def _worth_of(self, slots: Slots) -> Floats:
        """Returns the worth of each seed with its blend operator, [E, S], pp; 0 for an empty slot."""
        planted = slots.blueprint >= 0
        blueprint = np.where(planted, slots.blueprint, 0)
        worth = np.take_along_axis(self.worth, blueprint[:, :, None], axis=2)[:, :, 0]
        share = self.share[STYLE_OPERATOR[slots.style]]
        returns = self.law.returns**slots.merges
        return np.where(planted, worth * share * returns, 0.0)

    def _shared(self, leaning: Floats) -> Floats:
        """Returns the part of each seed's ``leaning`` [E, S] that overlaps with that of the other seeds, [E, S], pp."""
        # [E, S, S]; each seed's pair with itself is taken off again.
        pairs = np.minimum(leaning[:, :, None], leaning[:, None, :])
        return np.asarray(self.overlap * (pairs.sum(axis=2) - leaning))

    def _lost(self, leaning: Floats) -> Floats:
        """Returns the accuracy lost by switching off seeds that are leaned on by ``leaning`` [E, S]; [E], pp."""
        # Each pair's overlap is in the sum twice.
        return np.asarray(leaning.sum(axis=1) - self._shared(leaning).sum(axis=1) / 2)

    def _effect(self, worth: Floats, realised: Floats) -> Floats:
        """Returns the accuracy that all seeds add together, [E], pp."""
        helping = realised * (worth > 0)
        synergy = self.law.synergy * (helping[:, :-1] * helping[:, 1:]).sum(axis=1)
        return np.asarray((worth * realised).sum(axis=1) + synergy)


def _neighbours(values: Floats) -> Floats:
    """Returns the sum of the values of both neighbouring slots, [E, S]."""
    padded = np.pad(values, ((0, 0), (1, 1)))
    return padded[:, :-2] + padded[:, 2:]
