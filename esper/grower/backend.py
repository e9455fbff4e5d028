"""A model in a user's training loop as a backend of the phase loop: one host, E = 1."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.config import ConfigError, Durations
from esper.config.resolved import ResolvedConfig
from esper.core.action import STYLES, ActionSpec
from esper.core.blend import Seed
from esper.core.blueprints import Blueprint, BlueprintRegistry
from esper.core.place import Features
from esper.core.ramps import STYLES as BLEND_STYLES
from esper.core.site import GerminationFailed, PlantedSeed, Role, Site
from esper.core.slots import Bools, Floats, Ints
from esper.core.state import Choices, EnvState, never_shrinks
from esper.env.backend import Backend, FinalScores, Merge
from esper.env.catalog import BlueprintCatalog
from esper.env.host_row import Governance, assign_roles, record_seeds, record_validation
from esper.grower.layouts import mixes_positions, obstacle, require_unnoticed
from esper.grower.merging import LoopMerger, sizes_of_model
from esper.grower.optimizer import SeedGroups
from esper.grower.report import Evaluate, LoopWarnings, Score, read_score
from esper.grower.sites import SiteHooks, follow_layers
from esper.grower.stepping import move_state
from esper.hosts.example import kept_state
from esper.hosts.host import kept_modes
from esper.hosts.widen import resize
from esper.ops.torch_state import kept_generators
from esper.training.counterfactual import ALL_OFF, CounterfactualHelper
from esper.training.governor import Governor, Panic
from esper.training.metrics import HOST, SeedGradientCollector, count_not_finite, finite_buffers
from esper.training.rng import RngStream, SeedDraws, derive_seed, seeded


class LoopHost:
    """A model with its seeds and the state of their optimizer, for ``esper.training.snapshot``.

    A rollback does not touch what it does not know: learning-rate schedules, the scale of a GradScaler, averages of
    weights, and numbers in the optimizer's state that are not tensors.
    """

    def __init__(self, hooks: SiteHooks, groups: SeedGroups) -> None:
        self.hooks = hooks
        self.groups = groups
        self.epoch = 0
        """Number of epochs since the first :meth:`Grower.step`."""

    def assign(
        self,
        site: Site,
        role: Role,
        alpha: float,
        target: float,
        learning: bool,
    ) -> None:
        site.assign(role, alpha, target, learning)

    def remove(self, site: Site) -> None:
        site.remove()
        self.groups.remove(site.name)

    def drop_unkept(self) -> None:
        """Removes all seeds that are not kept."""
        for site in self.hooks.sites.values():
            if site.seed is not None and not site.fossil:
                self.remove(site)

    def network_tensors(self, slots: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yields parameters, buffers and optimizer state of the model and of the seeds in ``slots``, by name."""
        for owner, parameters in self._parameters_of(slots).items():
            module = self.hooks.model if owner == HOST else self.hooks.sites[owner].seed
            if module is None:
                continue
            for name, tensor in chain(module.named_parameters(), module.named_buffers()):
                yield f"{owner}.{name}", tensor
            for index, parameter in enumerate(parameters):
                for key, value in self.groups.optimizer.state.get(parameter, {}).items():
                    if isinstance(value, Tensor):
                        yield f"{owner}.state.{index}.{key}", value

    def _parameters_of(self, slots: Iterable[str]) -> dict[str, list[Tensor]]:
        """Returns the parameters of the model, as those of ``HOST``, and of the seeds in ``slots``."""
        groups = self.groups.groups
        parameters = {HOST: self.groups.host}
        for slot in slots:
            parameters[slot] = groups[slot]["params"]
        return parameters

    def layers(self) -> None:
        """Returns None: layers do not change while the model trains."""

    def discard(
        self,
        kept: Collection[str],
        saved: Mapping[str, Tensor],
        layers: None,
    ) -> None:
        """Removes the other seeds, all gradients, and state that the optimizer has made since."""
        for site in self.hooks.sites.values():
            if site.seed is not None and site.name not in kept:
                self.remove(site)
        state = self.groups.optimizer.state
        for owner, parameters in self._parameters_of(kept).items():
            for index, parameter in enumerate(parameters):
                parameter.grad = None
                for key, value in state.get(parameter, {}).items():
                    if isinstance(value, Tensor) and f"{owner}.state.{index}.{key}" not in saved:
                        del state[parameter]
                        break

    def not_finite(self) -> float:
        """Returns the number of non-finite values in the model's parameters and buffers and in its kept seeds."""
        model = self.hooks.model
        parameters = list(model.parameters())
        for site in self.hooks.sites.values():
            if site.seed is not None and site.fossil:
                parameters.extend(site.seed.parameters())
        return float(count_not_finite(model, finite_buffers(model), parameters))


class LoopBackend(Backend):
    """One model, E = 1. Training happens outside, between :meth:`train` and :meth:`measure`.

    Args:
        hooks: the seeds in the model.
        groups: their parameter groups.
        merger: makes kept ones a part of the layers.
        blueprints: what seeds are built from.
        config: the seed of new weights, and the counterfactuals.
        points: percentage points in a unit of the score.
        governed: whether a bad model is rolled back.
        spec: names of slots and blueprints, if the model has grown since they were chosen.
    """

    def __init__(
        self,
        hooks: SiteHooks,
        groups: SeedGroups,
        merger: LoopMerger,
        blueprints: BlueprintRegistry,
        config: ResolvedConfig,
        points: float,
        governed: bool,
        spec: ActionSpec | None = None,
    ) -> None:
        self.hooks = hooks
        self.groups = groups
        self.blueprints = blueprints
        self.config = config
        self.points = points
        places = [site.place for site in hooks.sites.values()]  # in execution order
        if spec is None:
            wanted = config.env.blueprints
            grows = bool(config.env.merge)
            spec = BlueprintCatalog.select(hooks.topology, places, blueprints, wanted, grows=grows).spec
        self.spec = spec
        self.sites = [hooks.sites[name] for name in self.spec.slots]
        """Sites in the order of the arrays' slots."""
        self.catalog = BlueprintCatalog(hooks.topology, [site.place for site in self.sites], blueprints, self.spec)
        self.only_added = self.catalog.only_added
        self.at_once = self.catalog.at_once & config.env.at_once
        self.counterfactual = CounterfactualHelper()
        self.germinations = 0
        self.warnings = LoopWarnings(points)
        self.needs: dict[str, float] = {}
        """Needs by slot that were measured since the last epoch."""
        self.training: tuple[float, float] | None = None
        """Mean loss and score of the batches of the last epoch; None if they are not known."""
        self.host = LoopHost(hooks, groups)
        self.governor: Governor | None = None
        """Rolls a bad model back; None if it is not governed."""
        if governed:
            durations = Durations.of(config, config.env.episode_length)
            self.governor = Governor(config.governor, durations, classes=None)
        self.governance = Governance(0, self.host, self.sites, self.counterfactual, self.governor)
        self.merger = merger
        # The owners of gradients are the host and the seed of each site.
        self.gradient_stats = SeedGradientCollector(1 + len(self.sites), groups.host[0].device)
        groups.gradient_stats = self.gradient_stats
        hooks.moved = partial(move_state, groups.optimizer)

    def reset(self, starting: Bools, run_seed: int, episodes: NDArray[np.int64]) -> None:
        """Changes nothing: the model is what its loop made of it."""

    def plant(
        self,
        where: Bools,
        blueprint: Ints,
        style: Ints,
    ) -> tuple[Ints, dict[int, str]]:
        sizes = np.zeros((len(where), 1), dtype=np.int64)
        failures = {}
        for row, s in np.argwhere(where).tolist():
            site = self.sites[s]
            operator = STYLES[int(style[row, 0])]
            name = self.spec.blueprints[int(blueprint[row, 0])]
            recipe = self.blueprints.at(self.hooks.topology, site.place, name)
            merges = bool(self.config.env.merge) and site.place.has_source
            fitting = partial(_require_fitting, self.hooks, site.name, merges)
            try:
                with seeded(self._seed(RngStream.SEED)):
                    seed = site.plant(recipe, BLEND_STYLES[operator], self.hooks.probes[site.name], fitting)
            except GerminationFailed as failure:
                failures[row] = str(failure)
                continue
            self._prepare(site.name, seed)
            self.germinations += 1
            sizes[row] = site.parameters
        return sizes, failures

    def _prepare(self, name: str, seed: PlantedSeed) -> None:
        """Gives a new seed its parameter group and random numbers of its own."""
        joins = self.config.env.at_once and seed.blueprint.at_once
        self.groups.add(name, seed.module, as_its_layer=joins)
        probe = self.hooks.probes[name].source
        self.hooks.draws[name] = SeedDraws(seed.module, probe, self._seed(RngStream.DROPOUT))

    def _seed(self, purpose: RngStream) -> int:
        return derive_seed(self.config.run.seed, 0, 0, purpose, self.germinations)

    def merge(self, due: Bools, state: EnvState) -> dict[int, Merge]:
        assign_roles(self.host, self.sites, state.slots, row=0)  # some were planted after the last epoch
        merged, parameters, flops = self.merger.merge(self.sites, due[0])
        if not merged.any():
            return {}
        follow_layers(self.hooks)
        return {0: Merge(merged, parameters, flops, self.sizes())}

    def rebase(self, where: Bools, state: EnvState) -> None:
        self.governance.rebase(state)

    def sizes(self) -> Choices:
        """Returns the sizes of the model and of the seeds that could be planted, as they are now."""
        catalog = self.catalog.at([site.place for site in self.sites])
        host_parameters, host_flops = sizes_of_model(self.hooks)
        # A site may have several rows of features for one sample, such as the windows of an image.
        rows = np.array([self.hooks.rows[slot] for slot in self.spec.slots])
        sizes = catalog.parameters()
        return Choices(
            host_parameters=host_parameters,
            host_flops=host_flops,
            parameters=sizes,
            flops=catalog.flops(self.hooks.probes, sizes) * rows[:, None],
            widths=catalog.widths(),
            kinds=catalog.kinds(self.config.env.at_once),
            **never_shrinks(len(self.spec.slots)),
        )

    def remove(self, where: Bools) -> None:
        for _, s in np.argwhere(where).tolist():
            self.host.remove(self.sites[s])

    def train(self, active: Bools, state: EnvState) -> None:
        """Gives each site its role for the epoch that the loop trains next."""
        assign_roles(self.host, self.sites, state.slots, row=0)
        learning = [site.name for site in self.sites if site.learning]
        on = [site.name for site in self.sites if site.on]
        self.groups.set_learning(learning, on)
        self.hooks.prepare_epoch()

    def score(
        self,
        evaluate: Evaluate,
        decision: int,
        epoch: int,
        training: tuple[float, float] | None,
    ) -> None:
        """Scores all networks that are to be compared, after ``epoch`` epochs and ``decision`` decisions.

        ``training`` are the mean loss and score of the epoch's training batches; None: they are not known.
        Unless ``env.counterfactual_every`` is set, these are at most two and one for each living seed: to score a
        network may be slow.

        Raises TypeError or ValueError as :func:`read_score` does; if the model is governed, scores after the first
        need not be finite.
        """
        self.training = training
        sites = list(self.hooks.sites.values())  # execution order
        buffers: list[Tensor] = []
        for site in sites:
            if site.seed is not None:
                buffers.extend(site.seed.buffers())
        self.groups.ranks.copy_from_first(buffers)
        every = self.config.env.counterfactual_every
        costly = every is not None and decision % every == 0
        plan = self.counterfactual.plan(sites, costly, lean=every is None)
        tried = [dict(zip(self.hooks.sites, alphas, strict=True)) for alphas in plan]
        scores = [self._score(evaluate, tried[0], epoch)]
        with kept_state(self.hooks.model):  # a loop without a Grower scores its model once
            scores += [self._score(evaluate, alphas, epoch) for alphas in tried[1:]]
            self.warnings.of_unit(scores[0].mean)
            if len(tried) > 1 and not self.warnings.repeated:
                self.warnings.of_noise(scores[0], self._score(evaluate, tried[0], epoch))
        samples = [score.samples for score in scores]
        if len(set(map(len, samples))) > 1:
            raise ValueError("evaluate returned scores of different numbers of samples for networks of one epoch")
        # A score that is not finite counts as 0, and its loss stays: the governor rolls such a model back.
        finite = np.nan_to_num(np.stack(samples), posinf=0.0, neginf=0.0)  # [K, n]
        self.counterfactual.record(
            finite * self.points / 100,
            np.array([score.loss_at(self.points) for score in scores]),
            np.ones(finite.shape[1]),
        )

    def measure(self, active: Bools, state: EnvState) -> None:
        """Writes the results of the last :meth:`score` and of the epoch's gradients."""
        self.host.epoch = int(state.epoch[0])
        loss, score = self.training or (0.0, 0.0)
        state.train_loss[0] = loss
        state.train_accuracy[0] = self.points * score
        state.train_measured[0] = self.training is not None
        record_validation(state, 0, self.counterfactual)
        for s, slot in enumerate(self.spec.slots):
            if slot in self.needs:
                state.slots.need[0, s] = self.needs[slot]
        self.needs = {}
        packed = self.gradient_stats.packed().cpu()
        summaries = self.gradient_stats.summaries(packed)
        if self.groups.scaler is None:
            self.warnings.of_scale(summaries)
        record_seeds(state, 0, self.spec.slots, self.counterfactual, summaries, self.config.env.gates)

    def _score(
        self,
        evaluate: Evaluate,
        alphas: dict[str, float],
        epoch: int,
    ) -> Score:
        """Evaluates the model with these alphas; every module's mode is as before afterwards."""
        model = self.hooks.model
        finite = self.governor is None or self.governor.chance is None
        with (
            kept_modes(model),
            kept_generators(self.hooks.devices),
            self.hooks.override_alphas(alphas),
            torch.no_grad(),
        ):
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
        bad = float(np.count_nonzero(~np.isfinite(losses)))
        if self.governor is not None:
            bad += self.host.not_finite()
        counts = self.groups.ranks.largest(np.array([bad, *broken]))
        rollback = self.governance.govern(state, math.nan, float(counts[0]), counts[1:] == 0)
        if rollback is None:
            return {}
        return {0: rollback}

    def final_scores(self, _env: int) -> FinalScores:
        return FinalScores(self.counterfactual.shapley())

    def test_accuracy(self, state: EnvState) -> Floats:
        return state.committed.copy()

    def state_dict(self) -> Any:
        """Returns the seeds in the order of their parameter groups; their optimizer state is the optimizer's."""
        hooks = self.hooks
        seeds = {}
        draws = {}
        for name in self.groups.groups:
            planted = hooks.sites[name].planted
            if planted is None:
                continue
            seeds[name] = _saved_seed(planted)
            draws[name] = hooks.draws[name].state_dict()
        buffers = {}
        for name, shadow in hooks.own_buffers.items():
            buffers[name] = [buffer.cpu().clone() for buffer in shadow.tensors()]
        return {
            "grown": self.merger.state_dict(),
            "seeds": seeds,
            "buffers": buffers,
            "draws": draws,
            **_saved_places(hooks),
            "germinations": self.germinations,
            "ages": dict(self.groups.ages),
            "repeated": self.warnings.repeated,
            "governor": None if self.governor is None else self.governor.state_dict(),
        }

    def load_state_dict(self, saved: Any, state: EnvState) -> None:
        device = self.groups.host[0].device
        hooks = self.hooks
        self.germinations = saved["germinations"]
        self.warnings.repeated = saved["repeated"]
        hooks.rows.update(saved["rows"])
        for name, (h, source) in saved["probes"].items():
            probe = Features(h, h if source is None else source)
            hooks.probes[name] = probe.each(lambda values: values.to(device))
        for name, recipe in saved["seeds"].items():
            site = hooks.sites[name]
            blueprint = self.blueprints.at(hooks.topology, site.place, recipe["blueprint"])
            seed = _planted_again(site, blueprint, recipe, hooks.probes[name])
            self._prepare(name, seed)
            hooks.draws[name].load_state_dict(saved["draws"][name])
        self.groups.ages.update(saved["ages"])
        if self.governor is not None:
            self.governor.load_state_dict(saved["governor"], device)
        self.train(~state.done, state)
        for name, shadow in hooks.own_buffers.items():
            for buffer, value in zip(shadow.tensors(), saved["buffers"][name], strict=True):
                buffer.copy_(value)

    def close(self) -> None:
        self.hooks.remove()
        self.groups.close()


def _saved_seed(planted: PlantedSeed) -> dict[str, Any]:
    """Returns what is needed to plant a seed again, with copies of its weights."""
    weights = planted.module.state_dict()
    return {
        "blueprint": planted.blueprint.name,
        "style": planted.style.name,
        "weights": {key: value.detach().cpu().clone() for key, value in weights.items()},
        "leading": planted.module.leading,
        "stays": planted.stays,
    }


def _planted_again(
    site: Site,
    blueprint: Blueprint,
    recipe: Mapping[str, Any],
    probe: Features,
) -> PlantedSeed:
    """Plants a seed that :func:`_saved_seed` has saved."""
    with seeded(0):  # all weights are overwritten
        seed = site.plant(
            blueprint,
            BLEND_STYLES[recipe["style"]],
            probe,
            leading=recipe["leading"],
        )
    seed.stays = recipe["stays"]
    shapes = {key: value.shape for key, value in recipe["weights"].items()}
    resize(seed.module, shapes)  # layers may have grown since it was made
    seed.module.load_state_dict(recipe["weights"])
    return seed


def _saved_places(hooks: SiteHooks) -> dict[str, Any]:
    """Returns where the sites lie and what was last seen there, by slot."""
    layouts = {}
    channels = {}
    for name, site in hooks.sites.items():
        layouts[name] = (site.place.topology, site.place.order)
        channels[name] = site.place.channels
    return {
        "layouts": layouts,
        "channels": channels,
        "between": {name: asdict(between) for name, between in hooks.between.items()},
        "probes": {name: _saved_probe(probe) for name, probe in hooks.probes.items()},
        "rows": dict(hooks.rows),
    }


def _saved_probe(probe: Features) -> tuple[Tensor, Tensor | None]:
    """Returns copies of the features at the sink and at the source; None for a source that is the sink."""
    h = probe.h.cpu().clone()
    if probe.source is probe.h:
        return h, None
    return h, probe.source.cpu().clone()


def _require_fitting(hooks: SiteHooks, name: str, merges: bool, seed: Seed) -> Seed:
    """Returns ``seed``.

    Raises ConfigError if it mixes positions where it must not, or if the model would notice it as a submodule, which it
    becomes at the end; not if it ``merges`` before.
    """
    place = hooks.sites[name].place
    reason = obstacle(hooks.model, place.topology, hooks.passes.last)
    if reason is not None and mixes_positions(seed, hooks.probes[name].source, place):
        raise ConfigError(f"it mixes positions, and {reason}")
    if not merges:
        require_unnoticed(hooks, name, seed)
    return seed
