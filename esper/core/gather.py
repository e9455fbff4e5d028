"""Growth of experience with the episodes of an env, and the part of it that controllers see."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from esper.config import ExperienceConfig
from esper.core.action import ActionSpec
from esper.core.slots import Bools, Floats, Ints, Slots
from esper.core.worth import Experience

Normals = Callable[[int, int], Floats]
"""Returns the standard normal numbers [S·B] of an env (first argument) in an episode (second)."""

WORTH, MEAN, ERROR, KEPT = range(4)
"""Columns of :attr:`Gatherer.seen`."""


class Gatherer:
    """The experience of E envs: one, if all their hosts are of one task, or one for each simulated world.

    Episodes are added as they end. What an env shows its controller is set when its episode starts, and does not change
    until the next one.

    Args:
        spec: names of slots and blueprints.
        n_envs: E.
        config: the prior.
        world_envs: number of envs in each world; None: all are in one.
        world_episodes: number of episodes after which a world ends and its experience is forgotten; None: it never
            ends. Worlds end in turn, so that some are young and others old at any time.
    """

    ARRAYS = ("seen", "scale", "episodes", "trials", "contributions", "merged")

    def __init__(
        self,
        spec: ActionSpec,
        n_envs: int,
        config: ExperienceConfig,
        world_envs: int | None = None,
        world_episodes: int | None = None,
    ) -> None:
        self.world = np.arange(n_envs) // (world_envs or n_envs)
        """Number of each env's world, [E]."""
        self.world_episodes = world_episodes
        worlds = self.world[-1] + 1
        self.experiences = [Experience(spec.slots, spec.blueprints, config) for _ in range(worlds)]
        """Experience of each world."""
        shape = (n_envs, len(spec.slots), len(spec.blueprints))
        self.seen = np.zeros((*shape, 4))
        """The worths that each env shows, [E, S, B, 4]: one to act on, the mean, its error (pp), and how often such a
        seed was kept."""
        self.scale = np.ones(n_envs)
        """s of each env's experience, pp [E]."""
        self.episodes = np.zeros(n_envs)
        """Number of episodes of each env's experience, [E]."""
        self.trials = np.full(shape, np.nan)
        """The last trial of each seed in the running episode, pp [E, S, B]; NaN if none."""
        self.contributions = np.full(shape, np.nan)
        """The last contribution, likewise."""
        self.merged = np.zeros(shape)
        """Number of such seeds that became a part of the host's layers in the running episode, [E, S, B]."""
        self.learns = True
        """Whether episodes are added, and worths to act on are drawn from the posterior (Thompson sampling). If not, as
        in evaluation, they are its mean."""
        self.given: Mapping[str, Any] | None = None
        """Experience that a new run seed starts with; None: none."""

    def age(self, episodes: Ints) -> Ints:
        """Returns the number of episodes since the world of each env began, [E]."""
        if self.world_episodes is None:
            return episodes
        return (episodes + self.world) % self.world_episodes

    def start(
        self,
        starting: Bools,
        episodes: Ints,
        normals: Normals,
    ) -> None:
        """Starts ``episodes`` [E] in the envs of ``starting`` bool [E]."""
        if self.world_episodes is not None:
            # Envs of age 0 begin a new world, of which nothing is known.
            begins = starting & (self.age(episodes) == 0)
            for world in np.unique(self.world[begins]).tolist():
                self.experiences[world].clear()
        self.trials[starting] = np.nan
        self.contributions[starting] = np.nan
        self.merged[starting] = 0
        for env in np.flatnonzero(starting).tolist():
            experience = self.experiences[self.world[env]]
            worths = experience.worths
            self.scale[env] = worths.scale
            self.episodes[env] = experience.episodes
            seen = self.seen[env]
            seen[..., MEAN] = worths.mean
            seen[..., ERROR] = worths.error
            seen[..., KEPT] = experience.kept.reshape(worths.mean.shape)
            shown = worths.mean
            if self.learns:
                shown = worths.draw(normals(env, int(episodes[env])))
            seen[..., WORTH] = shown

    def merge(self, merged: Bools, blueprint: Ints) -> None:
        """Counts seeds that became a part of their hosts: ``merged`` bool [E, S], of these blueprints [E, S]."""
        env, slot = np.nonzero(merged)
        self.merged[env, slot, blueprint[env, slot]] += 1

    def watch(self, slots: Slots) -> None:
        """Remembers the last measurements of the seeds in ``slots``; contributions while alpha stands still only."""
        settled = np.where(slots.steady & ~slots.fading, slots.contribution, np.nan)
        _remember(self.trials, slots.trial, slots)
        _remember(self.contributions, settled, slots)

    def end(
        self,
        ended: Bools,
        gains: Floats,
        slots: Slots,
    ) -> None:
        """Adds the episodes of ``ended`` bool [E]; ``gains`` [E, 2] are those of ``Experience.add``.

        A NaN is the gain of an episode that was cut short: only what was measured of its seeds is added. The same is
        done if there are blended seeds that are not kept: the host leans on them, so what the committed network has
        lost with them says nothing about the seeds that were kept.
        """
        if not self.learns or not ended.any():
            return
        unkept = (slots.alpha_on > 0) & ~slots.fossil
        gains = np.where(unkept.any(axis=1, keepdims=True), np.nan, gains)
        kept = self.merged.copy()
        env, slot = np.nonzero(slots.fossil)
        kept[env, slot, slots.blueprint[env, slot]] += 1
        for world, experience in enumerate(self.experiences):
            rows = ended & (self.world == world)
            experience.add(
                gains[rows],
                kept[rows],
                self.trials[rows],
                self.contributions[rows],
            )

    def give(self, state: Mapping[str, Any] | None) -> bool:
        """Starts from a saved experience, also after a new run seed, if it is of these slots and blueprints.

        Returns False, and changes nothing, if it is not.
        """
        if state is None or not self.experiences[0].fits(state):
            return False
        self.given = state
        self.forget()
        return True

    def forget(self) -> None:
        """Returns to the experience given at first, or to none."""
        for experience in self.experiences:
            experience.clear()
            if self.given is not None:
                experience.load_state_dict(self.given)

    def state_dict(self) -> dict[str, Any]:
        return {
            "experiences": [experience.state_dict() for experience in self.experiences],
            "arrays": {name: torch.from_numpy(getattr(self, name).copy()) for name in self.ARRAYS},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for experience, saved in zip(self.experiences, state["experiences"], strict=True):
            experience.load_state_dict(saved)
        for name in self.ARRAYS:
            getattr(self, name)[:] = state["arrays"][name].numpy()


def _remember(last: Floats, measured: Floats, slots: Slots) -> None:
    """Writes what was ``measured`` [E, S] of the seeds in ``slots`` to ``last`` [E, S, B]; NaN is left out."""
    env, slot = np.nonzero((slots.blueprint >= 0) & np.isfinite(measured))
    last[env, slot, slots.blueprint[env, slot]] = measured[env, slot]
