"""Growth inside the training loop of a user: the slots, the controller and the lifecycle, without the training."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from esper.agents.controller import Controller
from esper.agents.make import OwnController, controller_for, loaded
from esper.agents.spec import ControllerSpec
from esper.config import ConfigError, TrainingConfig
from esper.config.resolved import ResolvedConfig
from esper.core.action import Op
from esper.core.blueprints import BLUEPRINTS, BlueprintRegistry, choose
from esper.core.place import Place
from esper.core.state import Setting
from esper.grower.backend import LoopBackend
from esper.grower.env import Counted, LoopEnv, infer_layouts, probe_untrained, require_reached
from esper.grower.gradients import Ranks, plain_model
from esper.grower.optimizer import SeedGroups, SeedOptions
from esper.grower.report import Evaluate, GrowthStep, report, slots_of, why_nothing
from esper.grower.sites import SiteHooks
from esper.hosts.between import Between
from esper.hosts.container import network_of
from esper.hosts.find import Sites, named_sites
from esper.hosts.layout import Layout, check_sites
from esper.hosts.seed_hook import SitePath, require_finished
from esper.hosts.widen import warn_unmerged
from esper.telemetry.event import ActionTaken, Event

if TYPE_CHECKING:
    from esper.grower.log import LoopLog

logger = logging.getLogger(__name__)

FORMAT = 6
"""Format of a Grower's state."""


class Grower:
    """Grows ``model`` while a loop trains it: call :meth:`step` after each epoch, then :meth:`finish`.

    Until a seed is blended in, the model computes the same bits as without growth: a seed first learns beside it, from
    the same backward pass. Seeds are planted from the first :meth:`step` on, so the first epoch trains the model alone,
    unless :meth:`start` is called before it.

    Example::

        grower = esper.Grower(model, ["layer1", "layer2"], optimizer, horizon=epochs, scheduler=scheduler)
        for _ in range(epochs):
            model.train()
            for x, y in loader:
                optimizer.zero_grad()
                loss_fn(model(x), y).backward()
                optimizer.step()
            scheduler.step()
            print(grower.step(lambda model: (model.eval()(x_val).argmax(1) == y_val).float()))
        model = grower.finish()

    Args:
        model: the network. Hooks are registered on it; its parameters and ``state_dict`` stay as they are.
        sites: paths of submodules, or ``"auto"``, which needs ``example``; as in :func:`esper.graft`.
        optimizer: trains the model; seeds get parameter groups in it.
        controller: what decides, see ``--controller``.
        horizon: number of epochs that the loop trains, at least 2.
        topology: layout of the sites' outputs, see :func:`esper.graft`; None: inferred from a pass of the last batch in
            eval mode, before the first decision.
        incubation: how a seed learns before it is blended in: ``ste``, straight through, in the loop's own pass, or
            ``shadow``, in separate passes that :meth:`incubate` makes, which cost more and are more accurate.
        scheduler: the learning-rate schedules of ``optimizer``; a custom schedule needs an attribute ``optimizer``.
            None: a schedule that shows is an error; (): the loop sets rates by itself.
        scaler: the ``torch.amp.GradScaler`` that scales the loop's losses.
        averages: averages of the model's weights, such as torch's ``AveragedModel``, or copies that the loop averages:
            they use the model's seeds, and get copies of the kept seeds. :meth:`follow` adds later averages.
        lr_factor: learning rate of a seed in units of that of its layer's parameter group.
        warmup_steps: number of steps after planting over which the rate of a seed rises from near zero.
        weight_decay: of seeds.
        points: percentage points in one unit of the score: 100 for fractions (0 to 1), 1 for per cent. Gates, rewards
            and controllers compare percentage points.
        governor: whether to roll the model, its kept seeds and their optimizer state back to a snapshot when a score or
            a weight is not finite, or the loss collapses or diverges. It keeps two snapshots.
        baseline: scores after each of the ``horizon`` epochs of a loop without growth, which controllers compare with;
            None: the scores of this model without its seeds.
        config: thresholds of gates, limits on seeds and the run seed, as a TrainingConfig or its tables in dicts.
            Unless ``env.at_once`` is false, seeds that are zero at birth, such as widenings, are kept at once.
        blueprints: what seeds can be; None: the built-in blueprints.
        callbacks: receive every event.
        folder: a new or empty folder for the events, which `esper show` and `esper report` read; rank 0 writes it.
        example: a few inputs of the model, for ``sites="auto"``.
        samples: number of training samples, or their DataLoader; None: trained agents do not know it.
        classes: number of classes, if the loss of ``evaluate`` is cross-entropy; None: trained agents compare losses
            with the first one.

    Raises:
        ConfigError: a site, the controller, the optimizer or a number does not fit; a schedule was made for the
            optimizer and not passed; the model or a part around a site is compiled; another Grower grows the model.
    """

    def __init__(
        self,
        model: nn.Module,
        sites: Sites,
        optimizer: object,
        controller: str | OwnController = "heuristic",
        horizon: int = 100,
        *,
        topology: str | None = None,
        incubation: Literal["ste", "shadow"] = "ste",
        scheduler: object | None = None,
        lr_factor: float = 1.0,
        warmup_steps: int = 0,
        weight_decay: float = 0.0,
        points: float = 100.0,
        governor: bool = False,
        baseline: Sequence[float] | None = None,
        config: TrainingConfig | Mapping[str, Any] | None = None,
        blueprints: BlueprintRegistry | None = None,
        callbacks: Sequence[Callable[[Event], None]] = (),
        folder: str | Path | None = None,
        averages: Iterable[nn.Module] | None = None,
        example: Any = None,
        scaler: torch.amp.GradScaler | None = None,
        samples: object = None,
        classes: int | None = None,
    ) -> None:
        model, ranks = plain_model(model)
        named = named_sites(model, sites, example)
        self.slots = check_sites(model, named, topology)
        require_finished(model)
        followers = [network_of(average, model) for average in averages or ()]
        options = SeedOptions(lr_factor, warmup_steps, weight_decay)
        _check_numbers(horizon, baseline, points)
        self._setting = _setting_of(samples, classes)
        _check_incubation(incubation, ranks)
        self.model = model
        self.horizon = horizon
        self.points = points
        self.started = False
        """Whether the controller acted before the first epoch."""
        if not isinstance(config, TrainingConfig):
            config = TrainingConfig.parse(dict(config or {}))
        self.config = _resolved(config, horizon - 1)
        ControllerSpec.of(controller).check()
        self._loaded_controller = loaded(controller)
        self.blueprints = BLUEPRINTS.copy_of(blueprints)
        self.paths = {name: SitePath.parse(text) for name, text in named.items()}
        _check_blueprints(self.config.env.blueprints, self.blueprints, self.paths, topology)
        self._baseline = None if baseline is None else tuple(points * score for score in baseline)
        self.incubation = incubation
        self.governed = governor
        self.groups = SeedGroups(model, self.paths, optimizer, scheduler, options, self.config.task, ranks, scaler)
        self.hooks = SiteHooks(model, named, topology, straight_through=incubation == "ste")
        for network in followers:
            self.hooks.follow(network)
        self.epoch = 0
        """Number of epochs trained so far."""
        self.env: LoopEnv | None = None
        self.log: LoopLog | None = None
        """The run folder; None without one, and on ranks other than 0."""
        self.hooks.passes.before_training = self.groups.begin_pass
        self.hooks.stash = self.groups.stash
        self._listeners = list(callbacks)
        if folder is not None and ranks.first:
            # Only a loop that has a folder needs to know of files of runs.
            from esper.grower.log import LoopLog

            self.log = log = LoopLog(folder, type(model).__name__, controller, points)
            self._listeners.insert(0, log.emit)
            self.hooks.passes.before_first = lambda: log.create(self.config)
        self._events: list[Event] = []
        self._refusals = {""}  # reasons that were said; that of a success is empty
        self._steps_before = 0
        self._incubated = False

    def start(self, evaluate: Evaluate) -> GrowthStep:
        """Scores the untrained model and lets the controller plant before the first epoch; calling it is optional.

        ``evaluate``, TypeError and ValueError as in :meth:`step`; RuntimeError if anything was trained before.
        """
        if self.env is not None or self.groups.steps:
            raise RuntimeError("grower.start() comes once, before the first epoch is trained")
        self.config = _resolved(self.config, self.horizon)  # one more decision
        self.started = True
        probe_untrained(self.hooks, evaluate)
        return self._decide(evaluate)

    def step(self, evaluate: Evaluate, training: tuple[float, float] | None = None) -> GrowthStep:
        """Ends an epoch: scores the model, lets the controller act, and prepares the seeds for the next epoch.

        ``evaluate`` is called once for each network that is compared, such as the model without one of its seeds.
        ``training`` are the mean loss and score of the epoch's training batches, which trained agents compare with
        those of ``evaluate``; None: they do not know them.

        Raises:
            RuntimeError: the optimizer has not stepped since the last call, or all epochs are over.
            TypeError, ValueError: ``evaluate`` returned something else than finite scores.
        """
        if self.epoch >= self.horizon:
            raise RuntimeError(f"all {self.horizon} epochs are over: call grower.finish(), or raise horizon=")
        _require_trained(self.hooks, self.groups, self._steps_before, self._incubated)
        return self._decide(evaluate, 1, training)

    def _decide(
        self,
        evaluate: Evaluate,
        epochs: int = 0,
        training: tuple[float, float] | None = None,
    ) -> GrowthStep:
        """Lets the controller act on the model as it is after ``epochs`` more epochs."""
        if self.hooks.passes.last is None:  # the loop may call parts of the model, and evaluate the model itself
            probe_untrained(self.hooks, evaluate)
        env = self._opened()
        # One decision followed each earlier epoch, and one came before the first if the loop was started early.
        decisions = self.epoch + self.started * epochs
        env.backend.score(evaluate, decisions, self.epoch + epochs)  # first, because it may raise
        env.backend.training = training
        if epochs:
            env.note_updates(self.groups.steps - self._steps_before)
        observation = env.end_epoch() if decisions else env.begin()
        self.epoch += epochs
        self._steps_before = self.groups.steps
        self._incubated = False
        before = slots_of(env, self.points)
        if not env.done[0]:
            env.play(self.controller, observation)
        events = self._events
        self._events = []
        return report(env, self.epoch, self.points, events, before)

    def incubate(self, loss: Callable[[], Tensor]) -> None:
        """Trains incubating seeds on a batch, with ``incubation="shadow"``; call it before the optimizer steps.

        ``loss`` computes the loss of the batch with the model, scaled as the loop scales it. It is called once for each
        incubating seed, with the seed blended in at its target alpha, and only the seed gets gradients.
        """
        if self.incubation != "shadow":
            raise RuntimeError("grower.incubate() needs incubation='shadow'; with 'ste' seeds learn in the loop's pass")
        self._incubated = True
        self.hooks.incubate(loss)

    def measure_need(self, first: Callable[[], Tensor], second: Callable[[], Tensor]) -> dict[str, float]:
        """Measures the need of vacant slots on two batches, for the next :meth:`step`; call it after an epoch.

        Each function computes the mean loss of another batch with the model in training mode. Nothing of the training
        changes. Returns needs in units of the loss by slot, see the page on how a step runs; slots without two layers
        between source and sink have none.

        Raises ConfigError for a loss that does not depend on the model.
        """
        from esper.grower.need import measure_need  # few loops measure it

        env = self._opened()
        env.backend.needs = measure_need(self.hooks, first, second)
        return dict(env.backend.needs)

    def follow(self, average: nn.Module) -> None:
        """Lets ``average``, an average of the weights that was made after this Grower, use the seeds.

        Raises ConfigError for an average of another network.
        """
        self.hooks.follow(network_of(average, self.model))

    def finish(self, merge: bool = False) -> nn.Module:
        """Ends growth and returns the model with its kept seeds as ordinary submodules.

        Seeds that are not kept are removed. The groups of kept seeds stay in the optimizer, so that the model can be
        trained on.

        With ``merge``, kept seeds become parts of the layers where that is possible, as in ``esper.plain``: widenings
        more units, LoRAs other weights. Then the optimizer has the new parameters in place of the old ones, with their
        state; a warning says which seeds stay, and why. If nothing is kept, a log line says why.

        Raises RuntimeError if :meth:`step` was never called.
        """
        if self.env is None:
            raise RuntimeError("grower.step() was never called, so nothing has grown; call it after each epoch")
        if not self.kept:
            logger.warning(why_nothing(self.env))
        from esper.grower.finish import finish  # no loop needs it before

        self.env.backend.host.drop_unkept()
        warn_unmerged(finish(self.hooks, self.groups.optimizer if merge else None))
        self.env.close()
        if self.log is not None:
            self.log.finish(self.env, len(self.kept), sum(p.numel() for p in self.model.parameters()))
        return self.model

    def close(self) -> None:
        """Ends growth without keeping anything: all seeds and hooks are removed from the model and the optimizer."""
        for site in self.hooks.sites.values():
            if site.seed is not None:
                site.remove()
                self.groups.remove(site.name)
        self.hooks.remove()
        self.groups.close()
        if self.log is not None:
            self.log.claim.close()

    @property
    def kept(self) -> dict[str, str]:
        """Blueprints of the seeds that were kept, by slot."""
        kept = {}
        for name, site in self.hooks.sites.items():
            if site.fossil and site.planted is not None:
                kept[name] = site.planted.blueprint.name
        return kept

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of growth: load it before the optimizer's state, which includes that of the seeds."""
        state: dict[str, Any] = {
            "format": FORMAT,
            "epoch": self.epoch,
            "started": self.started,
            "log": None if self.log is None else self.log.state_dict(),
        }
        if self.env is not None:
            state["env"] = self.env.state_dict()
            state["controller"] = self.controller.memory_state()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from ``state``, in a new Grower with the same arguments; plants the seeds with their groups.

        Raises ConfigError if this Grower has been stepped, or the state does not fit it.
        """
        if self.env is not None or self.epoch:
            raise ConfigError("load_state_dict needs a new Grower, before its first step")
        _check_state(state, self.slots)
        if state["started"]:
            self.config = _resolved(self.config, self.horizon)
            self.started = True
        if "env" in state:
            hosts = state["env"]["hosts"]
            for name, count in hosts["channels"].items():
                between = Between(**hosts["between"][name]) if name in hosts["between"] else None
                self.hooks.place(name, count, Layout(*hosts["layouts"][name]), between)
            self._opened(state["env"]["counted"]).load_state_dict(state["env"])
            self.controller.load_memory_state(state["controller"])
        self.epoch = state["epoch"]
        if self.log is not None and state["log"] is not None:
            self.hooks.passes.before_first = None
            self.log.resume(state["log"], self.config, self.epoch)

    def _opened(self, counted: Counted | None = None) -> LoopEnv:
        """Returns the env; the first call makes it, since sites are known only after a forward pass.

        ``counted`` are the operations that a saved Grower has counted; None for a new one.
        """
        if self.env is not None:
            return self.env
        require_reached(self.hooks)
        if counted is None:
            infer_layouts(self.hooks)
        backend = LoopBackend(self.hooks, self.groups, self.blueprints, self.config, self.points, self.governed)
        setting = replace(self._setting, inputs=self.hooks.passes.inputs, learning_rate=self.groups.first_rate)
        env = LoopEnv(backend, self._baseline, self._emit, counted, setting)
        self.env = env
        self.controller: Controller = controller_for(self._loaded_controller, self.config, env, env.run_seed)
        self.controller.begin()
        if counted is None and self.log is not None:
            self.log.start(env)
        return env

    def _emit(self, event: Event) -> None:
        if isinstance(event, ActionTaken) and event.op == Op.GERMINATE.name:
            if event.reason not in self._refusals:
                logger.warning("a seed was not planted: %s", event.reason)
            self._refusals.add(event.reason)
        self._events.append(event)
        for listen in self._listeners:
            listen(event)


def _resolved(config: TrainingConfig, decisions: int) -> ResolvedConfig:
    """Returns the config of one host that makes ``decisions`` decisions and incubates straight through."""
    env = config.env
    chosen = {
        "n_envs": 1,
        "episode_length": decisions,
        "need_every": 1,  # by :meth:`Grower.measure_need`
        "incubation": "ste",
        "slots": None,
        "at_once": env.at_once is not False,
    }
    return ResolvedConfig.parse(config.tables_with({"env": chosen, "run": {"rounds": 1}}))


def _check_state(state: Mapping[str, Any], slots: Sequence[str]) -> None:
    """Raises ConfigError for the state of another Grower."""
    if state.get("format") != FORMAT:
        raise ConfigError(
            f"the state has format {state.get('format')}; this version reads {FORMAT}: continue with the version that "
            "saved it, or start again"
        )
    if "env" not in state:
        return
    saved = state["env"]["hosts"]["channels"]
    if set(saved) != set(slots):
        raise ConfigError(f"the state has slots {', '.join(saved)}, not {', '.join(slots)}")


def _require_trained(hooks: SiteHooks, groups: SeedGroups, steps_before: int, incubated: bool) -> None:
    """Raises RuntimeError if the model or a seed was not trained since the last decision.

    ``steps_before`` is the number of the optimizer's steps then; ``incubated`` whether shadow losses were given.
    """
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
        cause = "the loss does not depend on the output of its submodule"
        if not hooks.learned.issuperset(untaught):
            cause = "its submodule ran without gradients: take it out of torch.no_grad()"
        raise RuntimeError(
            f"the seed in slot {where} has learned nothing, because {cause}. A frozen network needs only "
            "requires_grad_(False) on its parameters"
        )


def _setting_of(samples: object, classes: int | None) -> Setting:
    """Reads what a loop says of its training. Raises ConfigError for a number that does not fit."""
    updates = 0
    count = samples
    if isinstance(samples, DataLoader):
        try:
            updates = len(samples)
            count = len(samples.dataset)  # type: ignore[arg-type]
        except TypeError:
            raise ConfigError("samples is a DataLoader whose data has no length; pass the number of samples") from None
    for name, value, least in (("samples", count, 1), ("classes", classes, 2)):
        if value is not None and (not isinstance(value, Integral) or value < least):
            raise ConfigError(f"{name} is {value!r}; it is a number of {least} or more, or None if it is not known")
    return Setting(samples=int(count or 0), updates=updates, classes=int(classes or 0))  # type: ignore[call-overload]


def _check_numbers(
    horizon: int,
    baseline: Sequence[float] | None,
    points: float,
) -> None:
    """Raises ConfigError for a number that does not fit."""
    if not isinstance(horizon, Integral) or horizon < 2:
        raise ConfigError(f"horizon is {horizon!r}; it is the number of epochs that the loop trains, at least 2")
    if not (math.isfinite(points) and points > 0):
        raise ConfigError(f"points is {points}; it must be positive")
    if baseline is not None and len(baseline) != horizon:
        raise ConfigError(f"baseline has {len(baseline)} scores; one after each of the {horizon} epochs is needed")


def _check_incubation(incubation: str, ranks: Ranks) -> None:
    """Raises ConfigError for a way to incubate that does not work."""
    if incubation not in ("ste", "shadow"):
        raise ConfigError(f"incubation is {incubation!r}; it must be 'ste' or 'shadow'")
    if incubation == "shadow" and ranks.parallel:
        raise ConfigError("incubation='shadow' does not work with DistributedDataParallel; use 'ste'")


def _check_blueprints(
    wanted: tuple[str, ...] | None,
    registry: BlueprintRegistry,
    paths: Mapping[str, SitePath],
    topology: str | None,
) -> None:
    """Raises ConfigError for a wanted blueprint that fits at no site of this topology; None: of any."""
    reading = {path.source is not None for path in paths.values()}
    topologies = (topology,) if topology else registry.topologies()
    possible: dict[str, None] = {}
    for kind in topologies:
        possible |= dict.fromkeys(registry.possible(kind, reading))
    places = [Place(slot, 0, path.source is not None) for slot, path in paths.items()]
    misfit = partial(registry.misfit, topology or "", places)
    choose(wanted, tuple(possible), f"{topology or 'such'} hosts", misfit)
