"""A model in someone else's training loop as a backend of the phase loop: one host, E = 1."""

from __future__ import annotations

import math
import warnings
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.attribution.counterfactual import ALL_OFF, CounterfactualHelper
from esper.attribution.paired import Paired
from esper.config import ConfigError, Durations
from esper.config_resolved import ResolvedConfig
from esper.env.backend import Backend
from esper.env.choices import joining, only_added
from esper.env.env_host import assign_roles
from esper.env.governance import Governance
from esper.env.measurements import record_seeds, record_validation
from esper.env.state import EnvState
from esper.grower.hooks import SiteHooks
from esper.grower.host import LoopHost
from esper.grower.optimizer import SeedGroups
from esper.grower.positions import mixes_positions, obstacle
from esper.grower.randomness import SeedDraws, kept_generators
from esper.grower.scores import Evaluate, Score, read_score, warning_of_unit
from esper.hosts.host import kept_modes
from esper.lifecycle.ramps import STYLES as BLEND_STYLES
from esper.lifecycle.slots import Bools, Floats, Ints
from esper.seeds.blend import Seed
from esper.seeds.blueprints import BlueprintRegistry
from esper.seeds.features import Features
from esper.seeds.site import GerminationFailed, PlantedSeed
from esper.spaces.action import STYLES, ActionSpec
from esper.training.governor import Governor, Panic
from esper.training.metrics import SeedGradientCollector
from esper.training.rng import RngStream, derive_seed, seeded

MAX_NOISE = 0.01
"""Difference of two scores of one network, in percentage points, that is not mentioned."""


class LoopBackend(Backend):
    """One model, E = 1. Training happens outside, between :meth:`train` and :meth:`measure`.

    Args:
        hooks: the seeds in the model.
        groups: their parameter groups.
        spec: names of slots and blueprints in actions.
        blueprints: what seeds are built from.
        config: the seed of new weights, and the counterfactuals.
        points: percentage points in a unit of the score.
        governed: whether a bad model is rolled back.
    """

    def __init__(
        self,
        hooks: SiteHooks,
        groups: SeedGroups,
        spec: ActionSpec,
        blueprints: BlueprintRegistry,
        config: ResolvedConfig,
        points: float,
        governed: bool,
    ) -> None:
        self.hooks, self.groups, self.spec, self.blueprints = hooks, groups, spec, blueprints
        self.config, self.points = config, points
        self.sites = [hooks.sites[name] for name in spec.slots]
        """Sites in the order of the arrays' slots."""
        places = (hooks.topology, [site.place for site in self.sites], spec, blueprints)
        self.only_added = only_added(*places)
        self.at_once = joining(*places) & config.env.at_once
        self.counterfactual = CounterfactualHelper()
        self.germinations = 0
        self.unit_warned = False
        """Whether the user knows of a score in another unit."""
        self.repeated = False
        """Whether one network has been scored twice, which shows the noise in scores."""
        self.host = LoopHost(hooks, groups)
        durations = Durations.of(config, config.env.episode_length)
        self.governor = Governor(config.governor, durations, classes=None) if governed else None
        self.governance = Governance(0, self.host, self.sites, self.counterfactual, self.governor)
        self.gradient_stats = groups.gradient_stats = SeedGradientCollector(1 + len(self.sites), groups.host[0].device)

    def reset(self, starting: Bools, run_seed: int, episodes: NDArray[np.int64]) -> None:
        """Changes nothing: the model is what its loop made of it."""

    def plant(self, where: Bools, blueprint: Ints, style: Ints) -> tuple[Ints, dict[int, str]]:
        sizes, failures = np.zeros((len(where), 1), dtype=np.int64), {}
        for row, s in np.argwhere(where).tolist():
            site, operator = self.sites[s], STYLES[int(style[row, 0])]
            name = self.spec.blueprints[int(blueprint[row, 0])]
            recipe = self.blueprints.at(self.hooks.topology, site.place, name)
            try:
                with seeded(self._seed(RngStream.SEED)):
                    fitting = partial(self._require_fitting, site.name)
                    seed = site.plant(recipe, BLEND_STYLES[operator], self.hooks.probes[site.name], fitting)
            except GerminationFailed as failure:
                failures[row] = str(failure)
                continue
            self._prepare(site.name, seed)
            self.germinations += 1
            sizes[row] = site.parameters
        return sizes, failures

    def _require_fitting(self, name: str, seed: Seed) -> Seed:
        """Returns ``seed``. Raises ConfigError if it mixes positions where it must not."""
        hooks = self.hooks
        place = hooks.sites[name].place
        reason = obstacle(hooks.model, place.topology, hooks.passes.last)
        if reason is not None and mixes_positions(seed, hooks.probes[name].source, place):
            raise ConfigError(f"it mixes positions, and {reason}")
        return seed

    def _prepare(self, name: str, seed: PlantedSeed) -> None:
        """Gives a new seed its parameter group and random numbers of its own."""
        joins = self.config.env.at_once and seed.blueprint.at_once
        self.groups.add(name, seed.module, as_its_layer=joins)
        self.hooks.draws[name] = SeedDraws(seed.module, self.hooks.probes[name].source, self._seed(RngStream.DROPOUT))

    def _seed(self, purpose: RngStream) -> int:
        return derive_seed(self.config.run.seed, 0, 0, purpose, self.germinations)

    def remove(self, where: Bools) -> None:
        for _, s in np.argwhere(where).tolist():
            self.host.remove(self.sites[s])

    def train(self, active: Bools, state: EnvState) -> None:
        """Gives each site its role for the epoch that the loop trains next."""
        assign_roles(self.host, self.sites, state.slots, row=0)
        learning = [site.name for site in self.sites if site.learning]
        self.groups.set_learning(learning, on=[site.name for site in self.sites if site.on])
        self.hooks.prepare_epoch()

    def score(self, evaluate: Evaluate, decision: int, epoch: int) -> None:
        """Scores all networks that are to be compared, after ``epoch`` epochs and ``decision`` decisions.

        Unless ``env.counterfactual_every`` is set, these are at most two and one for each living seed: to score a
        network may be slow.

        Raises TypeError or ValueError as :func:`read_score` does; if the model is governed, scores after the first
        need not be finite.
        """
        sites = list(self.hooks.sites.values())  # execution order
        self.groups.ranks.copy_from_first(b for site in sites if site.seed is not None for b in site.seed.buffers())
        every = self.config.env.counterfactual_every
        plan = self.counterfactual.plan(sites, costly=every is not None and decision % every == 0, lean=every is None)
        names = [site.name for site in sites]
        tried = [dict(zip(names, alphas, strict=True)) for alphas in plan]
        scores = [self._score(evaluate, alphas, epoch) for alphas in tried]
        self._warn_of_unit(scores[0].mean)
        if len(tried) > 1 and not self.repeated:
            self.repeated = True
            self._warn_of_noise(scores[0], self._score(evaluate, tried[0], epoch))
        if len({len(score.samples) for score in scores}) > 1:
            raise ValueError("evaluate returned scores of different numbers of samples for networks of one epoch")
        # A score that is not finite counts as 0, and its loss stays: the governor rolls such a model back.
        samples = np.nan_to_num(np.stack([score.samples for score in scores]), posinf=0.0, neginf=0.0)  # [K, n]
        # Without losses, what is missing to 100 pp counts, in units of one.
        losses = [1 - score.mean * self.points / 100 if score.loss is None else score.loss for score in scores]
        self.counterfactual.record(samples * self.points / 100, np.array(losses), np.ones(samples.shape[1]))

    def _warn_of_unit(self, mean: float) -> None:
        """Warns once if scores have another unit than ``points`` says."""
        words = None if self.unit_warned else warning_of_unit(mean, self.points)
        if words is not None:
            self.unit_warned = True
            warnings.warn(words, stacklevel=5)

    def _warn_of_noise(self, first: Score, again: Score) -> None:
        """Warns if ``evaluate`` has returned two scores for one network."""
        noise = abs(first.mean - again.mean)
        if noise * self.points > MAX_NOISE:
            warnings.warn(
                f"evaluate returned {first.mean:g}, and then {again.mean:g} for the same network: differences between "
                "networks that are not larger are noise. Score all of them on the same samples, in eval mode",
                stacklevel=5,
            )

    def measure(self, active: Bools, state: EnvState) -> None:
        """Writes the results of the last :meth:`score` and of the epoch's gradients."""
        self.host.epoch = int(state.epoch[0])
        record_validation(state, 0, self.counterfactual)
        summaries = self.gradient_stats.summaries(self.gradient_stats.packed().cpu())
        record_seeds(state.slots, 0, self.spec.slots, self.counterfactual, summaries, self.config.env.gates)

    def _score(self, evaluate: Evaluate, alphas: dict[str, float], epoch: int) -> Score:
        """Evaluates the model with these alphas; every module's mode is as before afterwards."""
        model, finite = self.hooks.model, self.governor is None or self.governor.chance is None
        with kept_modes(model), kept_generators(self.hooks.devices), self.hooks.trying(alphas), torch.no_grad():
            return self.groups.ranks.of_first(read_score(evaluate(model), epoch, finite))

    def take_first_snapshots(self, starting: Bools, state: EnvState) -> None:
        self.governance.take_first_snapshot(state)

    def govern(self, active: Bools, state: EnvState) -> dict[int, tuple[Panic, int]]:
        if not active[0]:
            return {}
        broken = [site.planted is not None and not bool(site.planted.finite) for site in self.sites]
        losses = [state.loss[0], state.committed_loss[0]]
        if self.counterfactual.measured(ALL_OFF):
            losses.append(state.all_off_loss[0])
        bad = float(sum(not math.isfinite(loss) for loss in losses))
        if self.governor is not None:
            bad += self.host.not_finite()
        counts = self.groups.ranks.largest(np.array([bad, *broken]))
        rollback = self.governance.govern(state, math.nan, float(counts[0]), counts[1:] == 0)
        return {} if rollback is None else {0: rollback}

    def shapley(self, _env: int) -> dict[str, Paired]:
        """Returns the Shapley values of the seeds by slot, from the last validation; {} unless all were measured."""
        return self.counterfactual.shapley()

    def test_accuracy(self, state: EnvState) -> Floats:
        return state.committed.copy()

    def state_dict(self) -> Any:
        """Returns the seeds in the order of their parameter groups; their optimizer state is the optimizer's."""
        seeds = {}
        for name in self.groups.groups:
            seed = self.hooks.sites[name].planted
            if seed is not None:
                weights = {key: value.detach().cpu().clone() for key, value in seed.module.state_dict().items()}
                seeds[name] = {"blueprint": seed.blueprint.name, "style": seed.style.name, "weights": weights}
        return {
            "seeds": seeds,
            "buffers": {
                name: [buffer.cpu().clone() for buffer in own.tensors()] for name, own in self.hooks.own_buffers.items()
            },
            "layouts": {name: (site.place.topology, site.place.order) for name, site in self.hooks.sites.items()},
            "channels": {name: site.place.channels for name, site in self.hooks.sites.items()},
            "between": {name: asdict(between) for name, between in self.hooks.between.items()},
            "draws": {name: draws.state_dict() for name, draws in self.hooks.draws.items() if name in seeds},
            "probes": {name: _saved_probe(probe) for name, probe in self.hooks.probes.items()},
            "germinations": self.germinations,
            "ages": dict(self.groups.ages),
            "repeated": self.repeated,
            "governor": None if self.governor is None else self.governor.state_dict(),
        }

    def load_state_dict(self, saved: Any, state: EnvState) -> None:
        device = self.groups.host[0].device
        self.germinations, self.repeated = saved["germinations"], saved["repeated"]
        for name, (h, source) in saved["probes"].items():
            self.hooks.probes[name] = Features(h, h if source is None else source).each(lambda t: t.to(device))
        for name, mine in saved["seeds"].items():
            site = self.hooks.sites[name]
            recipe = self.blueprints.at(self.hooks.topology, site.place, mine["blueprint"])
            with seeded(0):  # all weights are overwritten
                seed = site.plant(recipe, BLEND_STYLES[mine["style"]], self.hooks.probes[name])
            seed.module.load_state_dict(mine["weights"])
            self._prepare(name, seed)
            self.hooks.draws[name].load_state_dict(saved["draws"][name])
        self.groups.ages.update(saved["ages"])
        if self.governor is not None:
            self.governor.load_state_dict(saved["governor"], device)
        self.train(~state.done, state)
        for name, own in self.hooks.own_buffers.items():
            for buffer, value in zip(own.tensors(), saved["buffers"][name], strict=True):
                buffer.copy_(value)

    def close(self) -> None:
        self.hooks.remove()
        self.groups.close()


def _saved_probe(probe: Features) -> tuple[Tensor, Tensor | None]:
    """Returns copies of the features at the sink and at the source; None for the source of a site that reads its
    sink."""
    h, source = probe.h.cpu().clone(), probe.source.cpu().clone()
    return h, None if probe.source is probe.h else source
