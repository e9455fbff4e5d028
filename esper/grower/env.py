"""The vector env of one model that a user's loop trains: a controller sees what it sees of any host."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from esper.agents.controller import Controller, PerEnvController, log_prob_of
from esper.config import ConfigError
from esper.core.action import ActionSpec, Op, integers_of
from esper.core.arrays import Float32s
from esper.core.state import Baseline, Choices, EpisodeRules, Setting, copied, never_shrinks
from esper.core.units import units_in
from esper.env.backend import follow_layers
from esper.env.slot_env import Info, SlotVectorEnv, accepted_actions, info_of, start_episodes
from esper.grower.backend import LoopBackend
from esper.grower.optimizer import SeedGroups
from esper.grower.sites import SiteHooks, trained_at
from esper.hosts.example import kept_state
from esper.hosts.host import kept_modes
from esper.hosts.seed_hook import hooks_of
from esper.ops.torch_state import kept_generators, outside_inference
from esper.telemetry.event import Event
from esper.telemetry.score import ScoreUnit
from esper.telemetry.span import Spans

logger = logging.getLogger(__name__)


LOSS_SPREAD = 0.02
"""Standard deviation of the final loss that observations assume, as a fraction of the first measured loss: there are no
other hosts to measure it on. On `digits` eight hosts left alone have 0.02."""


def probe_untrained(hooks: SiteHooks, evaluate: Callable[[nn.Module], object]) -> None:
    """Runs the untrained model once, with probes from this pass."""
    hooks.finding = True
    try:
        with kept_state(hooks.model), kept_modes(hooks.model), kept_generators(hooks.devices), torch.no_grad():
            evaluate(hooks.model)
    finally:
        hooks.finding = False


def require_reached(hooks: SiteHooks) -> None:
    """Raises ConfigError for a site that no forward pass has reached."""
    unreached = [name for name in hooks.paths if name not in hooks.sites]
    missing = [f"{name} ({hooks.paths[name]})" for name in unreached]
    if hooks.passes.transformed.intersection(unreached):
        raise ConfigError(
            f"the submodule of slot {', '.join(missing)} runs only within transforms of torch.func, such as vmap, in "
            "which seeds do not learn: name a submodule outside of them, or call it with a whole batch"
        )
    if missing and hooks.passes.last is None:
        raise ConfigError(
            "evaluate has not run the model, and nothing else has: it must score the model that it is given by calling "
            f"it; no pass has reached slot {', '.join(missing)}"
        )
    if missing:
        raise ConfigError(
            f"no forward pass of the model has run the submodule of slot {', '.join(missing)}; train for an epoch "
            "before grower.step(), and call the model itself, not its parts"
        )


def require_open(groups: SeedGroups) -> None:
    """Raises RuntimeError after the end of growth."""
    if groups.closed:
        raise RuntimeError("growth has ended by grower.finish() or grower.close(): make a new Grower to grow on")


def require_trained(hooks: SiteHooks, groups: SeedGroups, steps_before: int, incubated: bool) -> None:
    """Raises RuntimeError if the model or a seed was not trained since the last decision.

    ``steps_before`` is the number of the optimizer's steps then; ``incubated`` whether shadow losses were given.
    """
    require_open(groups)
    if groups.steps == steps_before:
        raise RuntimeError(
            "the optimizer has not stepped since the last grower.step(); call it once after each epoch, with the "
            "optimizer that the Grower was given"
        )
    unseen = [name for name in hooks.sites if name not in hooks.probes]
    if unseen:
        raise RuntimeError(
            f"no pass in training mode has run slot {', '.join(unseen)}: call model.train() before each epoch, and "
            "leave only frozen submodules in eval mode"
        )
    waiting = [name for name, site in hooks.sites.items() if site.incubating and site.learning]
    if waiting and not hooks.straight_through and not incubated:
        raise RuntimeError(
            f"the seed in slot {', '.join(waiting)} has learned nothing: with incubation='shadow', call "
            "grower.incubate(lambda: loss of the batch) before each optimizer step"
        )
    waiting_for_samples = hooks.empty - hooks.learned  # such as an expert without tokens
    untaught = [name for name in groups.without_gradient if name not in waiting_for_samples]
    if untaught:
        where = ", ".join(f"{name} ({hooks.paths[name]})" for name in untaught)
        cause = "the loss does not depend on the output of its submodule, or backward(inputs=...) leaves seeds out"
        present = {hook.slot for _, _, hook in hooks_of(hooks.model) if hook.growth is hooks}
        if not present.issuperset(untaught):
            cause = "its submodule was replaced while the model grew: put the former one back"
        elif not trained_at(hooks).issuperset(untaught):
            cause = "no pass in training mode has run its submodule: call model.train() before each epoch"
        elif not hooks.learned.issuperset(untaught):
            cause = "its submodule ran without gradients: take it out of torch.no_grad()"
        raise RuntimeError(
            f"the seed in slot {where} has learned nothing, because {cause}. A frozen network needs only "
            "requires_grad_(False) on its parameters"
        )


def _saved(choices: Choices, spec: ActionSpec) -> dict[str, Any]:
    """Returns the sizes and names with which a Grower began, as plain values and tensors."""
    return {
        "host_parameters": choices.host_parameters,
        "host_flops": choices.host_flops,
        "parameters": copied(choices.parameters),
        "flops": copied(choices.flops),
        "widths": copied(choices.widths),
        "kinds": copied(choices.kinds),
        "slots": list(spec.slots),
        "blueprints": list(spec.blueprints),
        "offered": [list(names) for names in spec.offered],
    }


def first_choices(saved: Mapping[str, Any]) -> tuple[Choices, ActionSpec]:
    """Returns the sizes and names with which a saved Grower began."""
    choices = Choices(
        host_parameters=saved["host_parameters"],
        host_flops=saved["host_flops"],
        parameters=saved["parameters"].numpy(),
        flops=saved["flops"].numpy(),
        widths=saved["widths"].numpy(),
        kinds=saved["kinds"].numpy(),
        **never_shrinks(len(saved["slots"])),
    )
    offered = tuple(map(tuple, saved["offered"]))
    return choices, ActionSpec(tuple(saved["slots"]), tuple(saved["blueprints"]), offered)


class LoopEnv(SlotVectorEnv):
    """One model, E = 1. :meth:`begin` and :meth:`end_epoch` follow an epoch of training, :meth:`play` precedes one.

    The baseline is the score of the model without its seeds so far, and its last score from now on, unless the curve of
    a loop without growth is given. Scores count until the first seed joins the model at once; a score that was not
    measured is that of the epoch before.

    Args:
        backend: the model.
        baseline: scores (pp) of a loop without growth at each of the T + 1 observations, or at all but the first, which
            is then measured; None without such a loop.
        emit: receives events of what happens.
        first: the sizes of the model and of its seeds at first; None: they are those of now.
        setting: what is known of the training.
    """

    rules: EpisodeRules
    """Known from the start: nothing has to be measured before."""

    def __init__(
        self,
        backend: LoopBackend,
        baseline: tuple[float, ...] | None,
        emit: Callable[[Event], None],
        first: Choices | None,
        setting: Setting,
    ) -> None:
        self.backend: LoopBackend = backend
        choices = first or backend.sizes()
        super().__init__(
            backend.config,
            backend.spec,
            backend,
            Spans(marks=False),
            choices,
            setting,
            emit=emit,
        )
        self.known = baseline
        self.planted_units: dict[str, tuple[int, int]] = {}
        """Units before and with each widening that was there before the last merge at a decision, by slot."""
        self.without_seeds = np.full((2, self.horizon + 1), np.nan)
        """Score (pp) and loss of the model without its seeds by decision, [2, T + 1]; NaN for the future."""
        self.rules = self.prepare()
        self.score_unit = ScoreUnit("score", "", "", backend.points)

    def _no_growth(self) -> Baseline:
        return self._curve()

    def begin(self) -> Float32s:
        """Validates the model for the first time; returns the observation [1, size]."""
        start_episodes(self, np.ones(1, dtype=np.bool_))
        self._remember()
        return self._observe(self.rules)

    def play(self, controller: Controller, observation: Float32s) -> None:
        """Executes the actions that ``controller`` chooses until it WAITs or has used ``env.edits_per_epoch``; the next
        epoch is trained with what it plants.

        After a seed that is a part of the model at once, a rule always chooses again, so that such seeds need not wait
        for one another. An agent has learned how many decisions an epoch has.
        """
        while not self._trains(controller, observation):
            nothing = np.zeros_like(self.done)  # nothing was trained
            self._pay(self.rules, ~self.done, nothing)
            observation = self._observe(self.rules)
        self.planted_units = {}
        for name, site in self.backend.hooks.sites.items():
            units = units_in(site)
            if units is not None:
                self.planted_units[name] = units
        self.loop.join(~self.done)
        follow_layers(self)
        self.backend.train(~self.done, self.state)

    def _trains(self, controller: Controller, observation: Float32s) -> bool:
        """Executes an action; returns whether the controller is done before the epoch."""
        actions = integers_of(controller.act(observation, self.mask.heads(self.action_spec)))
        if self.loop.reporter is not None:
            self.loop.reporter.expect(log_prob_of(controller, self.num_envs))
        kept = int(self.state.slots.fossil.sum())
        trains = self.loop.begin_epoch(accepted_actions(self, actions))
        done = bool(trains[0])
        germinates = int(actions[0, 0]) == Op.GERMINATE
        if not germinates or not isinstance(controller, PerEnvController):
            return done
        joined = int(self.state.slots.fossil.sum()) > kept
        return done and not joined

    def note_updates(self, updates: int) -> None:
        """Remembers the number of steps in an epoch, which a loop shows when one is over."""
        self._know(replace(self.setting, updates=updates))

    def note_needs(self, needs: Mapping[str, float]) -> None:
        """Remembers the need of vacant slots until the next validation, in units of the loss."""
        self.backend.needs = dict(needs)

    def _know(self, setting: Setting) -> None:
        self.setting = setting
        self.rules = replace(self.rules, setting=setting)

    def end_epoch(self) -> Float32s:
        """Validates the model after an epoch; returns the observation [1, size]."""
        idle = self.done.copy()
        self.loop.finish_epoch(~idle)
        self._remember()
        return self._result(self.rules, idle, ~idle)[0]

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        state["without_seeds"] = copied(self.without_seeds)
        state["setting"] = asdict(self.setting)
        state["first"] = _saved(self.choices, self.action_spec)
        return state

    @outside_inference()
    def load_state_dict(self, state: dict[str, Any]) -> tuple[Float32s, Info]:
        self.without_seeds[...] = state["without_seeds"].numpy()
        super().load_state_dict(state)
        self._know(Setting(**state["setting"]))
        self.rules = replace(self.rules, baseline=self._curve())
        return self._observe(self.rules), info_of(self, self.rules, self.done)

    def _remember(self) -> None:
        """Notes the score and the loss of the model without its seeds, and the curve that they continue."""
        state = self.state
        epoch = int(state.epoch[0])
        self.without_seeds[:, epoch] = state.all_off[0], state.all_off_loss[0]
        # A model that has trained with a seed from the start is not without it what it would be.
        slots = state.slots
        leans = (slots.fossil & self.backend.at_once[slots.blueprint]).any() or slots.merges.any()
        if epoch and (leans or np.isnan(state.all_off[0])):
            self.without_seeds[:, epoch] = self.without_seeds[:, epoch - 1]
        self.rules = replace(self.rules, baseline=self._curve())

    def _curve(self) -> Baseline:
        """Returns the model's curve without seeds so far, its last value from then on: epochs are scored in order."""
        measured = int((~np.isnan(self.without_seeds[0])).sum())
        curves = self.without_seeds.copy()
        if measured:
            curves[:, measured:] = curves[:, measured - 1, np.newaxis]
        else:
            curves[:] = 0.0
        accuracy, losses = curves.tolist()
        spread = LOSS_SPREAD * max(losses[0], 1e-3)
        known = self.known or ()
        accuracy[len(accuracy) - len(known) :] = known
        return Baseline(tuple(accuracy), tuple(losses), spread, episodes=1)
