"""Simulated hosts as a backend of the phase loop, under the law of :mod:`esper.env.planted_law`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from esper.core.ramps import STYLE_IS_GATED, STYLE_OPERATOR
from esper.core.slots import IS_ON, Bools, Floats, Ints, Slots
from esper.core.stage import SeedStage
from esper.core.state import EnvState, copied
from esper.env.backend import Backend, Merge, Release
from esper.env.planted_law import SimParams
from esper.env.planted_layers import MATURE, PlantedLayers
from esper.training.rng import RngStream, derive_seed


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
        "experience",
        "trained_alpha",
        "merged_worth",
        "merged_gain",
        "scar",
        "noise",
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
        self.worth = np.array(law.worth)
        """Worths of seeds, [S, B] or of each host [E, S, B], pp."""
        self.share = np.array(law.share)
        self.ripening = law.seed_time * horizon
        """Experience at which a seed has ripened to 1 − 1/e."""
        self.experience = np.zeros((n_envs, slots))
        self.trained_alpha = np.zeros_like(self.experience)
        """Alpha in the last trained epoch, [E, S]."""
        self.can_merge = np.array(law.merges or (False,) * len(law.blueprints))
        self.merged_worth = np.zeros_like(self.experience)
        """Worth of all merged seeds of a slot, [E, S], pp; ``merged_gain`` is what they add now."""
        self.merged_gain = np.zeros_like(self.experience)
        self.layers = PlantedLayers(law, n_envs)
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
            self.layers.reset(env)
            episode = int(episodes[env])
            draw = np.random.default_rng(derive_seed(run_seed, env, episode, RngStream.NOISE))
            self.noise[env] = draw.standard_normal(self.noise.shape[1:]) * scale

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
        flops = self.law.choices.flops_of(slots)
        merges = {}
        for env in np.flatnonzero(merged.any(axis=1)).tolist():
            merges[env] = self.layers.merge(
                env,
                merged[env],
                slots.blueprint[env],
                slots.parameters[env],
                flops[env],
                worth[env],
            )
        return merges

    def take_out(self, where: Bools) -> dict[int, Release]:
        releases = {}
        for env, s in np.argwhere(where).tolist():
            maturity = self.merged_gain[env, s] / (self.merged_worth[env, s] or 1.0)
            releases[env], worth = self.layers.release(env, s)
            self.merged_worth[env, s] -= worth
            self.merged_gain[env, s] -= worth * maturity
            # The inverse of the law's maturity.
            exponent = -np.log1p(-min(maturity, MATURE))
            self.experience[env, s] = exponent * self.law.seed_time * self.horizon
            self.trained_alpha[env, s] = 1.0  # nothing changes: no shock
        return releases

    @property
    def maturity(self) -> Floats:
        """Maturity m of seeds, [E, S]."""
        return np.asarray(1 - np.exp(-self.experience / self.ripening))

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
        ripens = 1 - np.exp(-plasticity[:, None] / self.ripening)
        self.merged_gain += np.where(trained, (self.merged_worth - self.merged_gain) * ripens, 0.0)
        np.copyto(self.trained_alpha, alpha, where=trained)

    def measure(self, active: Bools, state: EnvState) -> None:
        true = self.true_accuracies(state.slots, state.epoch)
        trained = active & (state.epoch > 0)
        loss = self.law.loss(true.accuracy)
        state.write(trained, train_accuracy=true.accuracy, train_loss=loss, train_measured=True)

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
            contribution_error=self.law.paired_noise,
            epochs_since_measured=0,
        )

        # A seed that is blended alone interacts with nothing, which costs no measurement to know.
        due = state.epoch % self.counterfactual_every == 0
        alone = blended.sum(axis=1) == 1
        seeds.write(blended & (due | alone)[:, None], interaction=measured.interaction)

        incubating = active & (seeds.stage == SeedStage.TRAINING)
        seeds.write(incubating, trial=measured.trial, trial_error=self.law.paired_noise)

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
        arrays = {name: copied(getattr(self, name)) for name in self.STATE}
        return {**arrays, "layers": self.layers.state()}

    def load_state_dict(self, saved: Any, state: EnvState) -> None:
        for name in self.STATE:
            getattr(self, name)[:] = saved[name].numpy()
        self.layers.load_state(saved["layers"])

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
        leaning = self.law.reliance * realised
        kept = np.where(slots.fossil, realised, 0.0)
        unkept = np.where(slots.fossil, 0.0, leaning)
        alone = self.law.host_accuracy(epoch, self.horizon) - self.scar + self.merged_gain.sum(axis=1)
        return Accuracies(
            accuracy=np.clip(alone + self._effect(worth, realised), 0.0, 100.0),
            committed=np.clip(alone + self._effect(worth, kept) - unkept.sum(axis=1), 0.0, 100.0),
            all_off=np.clip(alone - leaning.sum(axis=1), 0.0, 100.0),
            contribution=worth * realised + interaction + leaning,
            interaction=interaction,
            trial=worth * on_trial + helpful * on_trial * pull,
        )

    def _worth_of(self, slots: Slots) -> Floats:
        """Returns the worth of each seed with its blend operator, [E, S], pp; 0 for an empty slot."""
        planted = slots.blueprint >= 0
        blueprint = np.where(planted, slots.blueprint, 0)
        worths = np.broadcast_to(self.worth, (*blueprint.shape, self.worth.shape[-1]))
        worth = np.take_along_axis(worths, blueprint[..., None], axis=-1)[..., 0]
        share = self.share[STYLE_OPERATOR[slots.style]]
        returns = self.law.returns**slots.merges
        return np.where(planted, worth * share * returns, 0.0)

    def _effect(self, worth: Floats, realised: Floats) -> Floats:
        """Returns the accuracy that all seeds add together, [E], pp."""
        helping = realised * (worth > 0)
        synergy = self.law.synergy * (helping[:, :-1] * helping[:, 1:]).sum(axis=1)
        return np.asarray((worth * realised).sum(axis=1) + synergy)


def _neighbours(values: Floats) -> Floats:
    """Returns the sum of the values of both neighbouring slots, [E, S]."""
    padded = np.pad(values, ((0, 0), (1, 1)))
    return padded[:, :-2] + padded[:, 2:]
