"""The vector env of one model that a user's loop trains: a controller sees what it sees of any host."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from esper.agents.controller import Controller, PerEnvController, log_prob_of
from esper.config import ConfigError
from esper.core.action import Op
from esper.core.arrays import Float32s
from esper.core.state import Baseline, Choices, EpisodeRules, Setting, copied
from esper.data.rng import kept_generators
from esper.env.slot_env import Info, SlotVectorEnv, accepted_actions, info_of, start_episodes
from esper.grower.backend import LoopBackend
from esper.grower.sites import SiteHooks
from esper.hosts.between import Trace
from esper.hosts.example import cloned, counting, outputs_for
from esper.hosts.host import kept_modes
from esper.telemetry.event import Event
from esper.telemetry.span import Spans

logger = logging.getLogger(__name__)

LOSS_SPREAD = 0.02
"""Standard deviation of the final loss that observations assume, as a fraction of the first measured loss: there are no
other hosts to measure it on. On `digits` eight hosts left alone have 0.02."""


Counted = tuple[float, Tensor]
"""Operations of a forward pass, a sample: of the model, and of each seed that could be planted, float64 [S, B]."""


def probe_untrained(hooks: SiteHooks, evaluate: Callable[[nn.Module], object]) -> None:
    """Runs the untrained model once, with probes from this pass."""
    hooks.finding = True
    try:
        with kept_modes(hooks.model), kept_generators(hooks.devices), torch.no_grad():
            evaluate(hooks.model)
    finally:
        hooks.finding = False


def require_reached(hooks: SiteHooks) -> None:
    """Raises ConfigError for a site that no forward pass has reached."""
    missing = [f"{name} ({path})" for name, path in hooks.paths.items() if name not in hooks.sites]
    if missing:
        raise ConfigError(
            f"no forward pass of the model has run the submodule of slot {', '.join(missing)}; train for an epoch "
            "before grower.step(), and call the model itself, not its parts"
        )


def infer_layouts(hooks: SiteHooks) -> None:
    """Infers the layouts of the sites without a declared layout, and the layers between sources and sinks.

    Raises ConfigError if the model cannot run on the last batch in eval mode.
    """
    wanted = hooks.paths
    if hooks.declared is not None:
        wanted = {name: path for name, path in wanted.items() if path.source is not None}
    if not wanted:
        return
    if hooks.passes.last is None:
        raise ConfigError(
            "no pass has called the model itself, only methods or parts of it, so that nothing shows how features lie "
            "in memory: call model(x) in the loop or in evaluate, or pass topology="
        )
    try:
        trace = Trace(hooks.model, partial(run_last, hooks), list(wanted.values()))
        layouts = trace.layouts(wanted, hooks.declared, hooks.passes.samples)
    except ConfigError as error:
        places = ", ".join(map(str, wanted.values()))
        raise ConfigError(
            f"what lies at {places} is looked up in a pass of the last batch in eval mode, which fails: {error}; "
            "sites that read their sink need no pass if topology= says what they return"
        ) from error
    for name, path in wanted.items():
        between = None if path.source is None else trace.between(path)
        hooks.place(name, trace.width(path.sink, layouts[name]), layouts[name], between)


def count_operations(hooks: SiteHooks) -> float:
    """Returns the operations of a forward pass of the model, a sample of the last batch.

    They are 0 if nothing can be counted: the model cannot run on the batch in eval mode, or its inputs have no samples.
    """
    if hooks.passes.last is None:
        return 0.0
    try:
        with counting() as counter:
            run_last(hooks)
    except ConfigError as error:
        logger.info("the operations of a pass are not known: %s", error)
        return 0.0
    samples = hooks.passes.samples
    if not samples:
        return 0.0
    return counter.get_total_flops() / samples


def run_last(hooks: SiteHooks) -> list[Tensor]:
    """Returns the tensors that the model returns for the last batch in eval mode.

    It runs without compiled code, which would hide its layers.
    """
    arguments, keywords = cloned(hooks.passes.last)
    with torch.compiler.set_stance("force_eager"):
        return outputs_for(hooks.model, arguments, keywords)


def count(backend: LoopBackend) -> Counted:
    """Counts the operations of the model and of seeds, in passes of the last batch and of the probes."""
    hooks = backend.hooks
    spec = backend.spec
    seeds = backend.catalog.flops(hooks.probes)
    # A site may have several rows of features for one sample, such as the windows of an image.
    rows = np.array([hooks.rows[slot] for slot in spec.slots])
    return count_operations(hooks), torch.from_numpy(seeds * rows[:, None])


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
        counted: the operations of the model and of seeds, as ``state_dict`` gave them; None counts them.
        setting: what is known of the training.
    """

    rules: EpisodeRules
    """Known from the start: nothing has to be measured before."""

    def __init__(
        self,
        backend: LoopBackend,
        baseline: tuple[float, ...] | None,
        emit: Callable[[Event], None],
        counted: Counted | None,
        setting: Setting,
    ) -> None:
        self.backend: LoopBackend = backend
        config = backend.config
        host_flops, seed_flops = counted or count(backend)
        choices = Choices(
            host_parameters=sum(p.numel() for p in backend.hooks.model.parameters()),
            host_flops=host_flops,
            parameters=backend.catalog.parameters(),
            flops=seed_flops.numpy(),
            widths=backend.catalog.widths(),
            kinds=backend.catalog.kinds(config.env.at_once),
        )
        super().__init__(config, backend.spec, backend, Spans(marks=False), choices, setting, emit=emit)
        self.configure(learns=False)  # one episode
        self.known = baseline
        self.removed: dict[str, str] = {}
        """The last seed that was removed from each slot, in words."""
        self.without_seeds = np.full((2, self.horizon + 1), np.nan)
        """Score (pp) and loss of the model without its seeds by decision, [2, T + 1]; NaN for the future."""
        self.rules = self.prepare()

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
        self.backend.train(~self.done, self.state)

    def _trains(self, controller: Controller, observation: Float32s) -> bool:
        """Executes an action; returns whether the controller is done before the epoch."""
        actions = controller.act(observation, self.mask.heads(self.action_spec))
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

    def _know(self, setting: Setting) -> None:
        self.setting = setting
        self.rules = replace(self.rules, setting=setting)

    def end_epoch(self) -> Float32s:
        """Validates the model after an epoch; returns the observation [1, size]."""
        idle = self.done.copy()
        self.loop.finish_epoch(~idle)
        self._remember()
        return self._result(self.rules, idle, ~idle)[0]

    def note_removed(self, slot: str, words: str) -> None:
        """Remembers the last seed that was removed from ``slot``, with the reason."""
        self.removed[slot] = words

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        state["without_seeds"] = copied(self.without_seeds)
        state["setting"] = asdict(self.setting)
        state["counted"] = (self.choices.host_flops, copied(self.choices.flops))
        state["removed"] = dict(self.removed)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> tuple[Float32s, Info]:
        self.without_seeds[...] = state["without_seeds"].numpy()
        self.removed = dict(state["removed"])
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
        leans = (state.slots.fossil & self.backend.at_once[state.slots.blueprint]).any()
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
