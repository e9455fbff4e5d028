"""Growth inside the training loop of a user: the slots, the controller and the lifecycle, without the training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from esper.agents.controller import Controller
from esper.agents.make import OwnController, controller_for, loaded
from esper.agents.spec import ControllerSpec
from esper.config import ConfigError, TrainingConfig
from esper.core.blueprints import BLUEPRINTS, BlueprintRegistry
from esper.grower.backend import LoopBackend
from esper.grower.checks import (
    FORMAT,
    arguments_of,
    asked,
    check_blueprints,
    check_incubation,
    check_merge,
    check_numbers,
    check_state,
    resolved,
    setting_of,
)
from esper.grower.env import (
    LoopEnv,
    first_choices,
    probe_untrained,
    require_open,
    require_reached,
    require_trained,
)
from esper.grower.gradients import plain_model
from esper.grower.layouts import infer_layouts
from esper.grower.merging import LoopMerger
from esper.grower.optimizer import SeedGroups, SeedOptions, first_rate
from esper.grower.record import LoopRecord
from esper.grower.report import Evaluate, GrowthStep, report, slots_of
from esper.grower.sites import SiteHooks
from esper.hosts.between import Between
from esper.hosts.container import network_of
from esper.hosts.find import Sites, named_sites
from esper.hosts.layout import Layout, check_sites
from esper.hosts.seed_hook import require_finished
from esper.hosts.sources import SitePath
from esper.ops.torch_state import outside_inference
from esper.telemetry.event import Event

if TYPE_CHECKING:
    from esper.grower.log import LoopLog
    from esper.grower.summary import GrowthSummary


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
        controller: what decides, see ``--controller``. None: ``advisor`` if a site widens layers, and ``samples``, the
            DataLoader, and ``classes`` are given; otherwise ``heuristic``.
        horizon: number of epochs that the loop trains, at least 2.
        topology: layout of the sites' outputs, see :func:`esper.graft`; None: inferred from a pass of the last batch in
            eval mode, before the first decision.
        incubation: how a seed learns before it is blended in: ``ste``, straight through, in the loop's own pass, or
            ``shadow``, in separate passes that :meth:`incubate` makes, which cost more and are more accurate.
        scheduler: the learning-rate schedules of ``optimizer``; a custom schedule needs an attribute ``optimizer``.
            None: a schedule that shows is an error; (): the loop sets rates by itself.
        scaler: the ``torch.amp.GradScaler`` that scales the loop's losses.
        averages: averages of the model's weights, such as ``AveragedModel``, which get copies of kept seeds, too.
        lr_factor: learning rate of a seed in units of that of its layer's parameter group.
        warmup_steps: number of steps after planting over which the rate of a seed rises from near zero.
        weight_decay: of seeds.
        points: percentage points in one unit of the score: 100 for fractions (0 to 1), 1 for per cent. Gates, rewards
            and controllers compare percentage points.
        governor: whether to roll the model, its kept seeds and their optimizer state back to a snapshot when a score or
            a weight is not finite, or the loss collapses or diverges. It keeps two snapshots.
        baseline: scores without growth after each epoch; None: those of this model without its seeds.
        config: thresholds of gates, limits on seeds and the run seed, as a TrainingConfig or its tables in dicts.
            Unless ``env.at_once`` is false, seeds that are zero at birth, such as widenings, are kept at once.
        blueprints: what seeds can be; None: the built-in blueprints.
        callbacks: receive every event.
        folder: a new or empty folder for the events, which `esper show` and `esper report` read; rank 0 writes it.
        example: a few inputs of the model, for ``sites="auto"``.
        samples: number of training samples, the data, or a DataLoader of the data; None: trained agents do not know it.
        classes: number of classes, if the loss of ``evaluate`` is cross-entropy; None: trained agents compare losses
            with the first one.
        price: pp that a doubling of the parameters has to bring, as ``reward.price`` in the mode ``priced``.
        merge: whether seeds that were kept for an epoch become a part of the layers, see ``env.merge``; parameters of
            the model stay the same objects, with other shapes. None: only with the advisor, and on one rank.

    Raises:
        ConfigError: a site, the controller, the optimizer or a number does not fit, or has no effect; a schedule was
            made for the optimizer and not passed; the model or a part around a site is compiled; another Grower grows
            the model.
    """

    @outside_inference()
    def __init__(
        self,
        model: nn.Module,
        sites: Sites,
        optimizer: object,
        controller: str | OwnController | None = None,
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
        merge: bool | None = None,
        price: float | None = None,
    ) -> None:
        model, ranks = plain_model(model)
        named = named_sites(model, sites, example)
        self.slots = check_sites(model, named, topology)
        require_finished(model)
        followers = [network_of(average, model) for average in averages or ()]
        options = SeedOptions(lr_factor, warmup_steps, weight_decay)
        check_numbers(horizon, baseline, points)
        self._setting = setting_of(samples, classes, model, example)
        check_incubation(incubation, ranks)
        self.model = model
        self.horizon = horizon
        self.points = points
        self.started = False
        """Whether the controller acted before the first epoch."""
        self.paths = {name: SitePath.parse(text) for name, text in named.items()}
        controller, config, self.reason = asked(controller, config, self.paths, self._setting, merge, price, ranks)
        self.config = resolved(config, horizon - 1)
        check_merge(self.config, ranks)
        ControllerSpec.of(controller).check()
        self._loaded_controller = loaded(controller)
        self.blueprints = BLUEPRINTS.copy_of(blueprints)
        check_blueprints(self.config.env.blueprints, self.blueprints, self.paths, topology)
        self._baseline = None if baseline is None else tuple(points * score for score in baseline)
        self.incubation = incubation
        self.governed = governor
        self.record = LoopRecord(self.slots, sites, named)
        self.groups = SeedGroups(model, self.paths, optimizer, scheduler, options, self.config.task, ranks, scaler)
        self.hooks = SiteHooks(model, named, topology, straight_through=incubation == "ste")
        for network in followers:
            self.hooks.follow(network)
        self.merger = LoopMerger(self.hooks, self.groups)
        self.epoch = 0
        """Number of epochs trained so far."""
        self.env: LoopEnv | None = None
        self.log: LoopLog | None = None
        """The run folder; None without one, and on ranks other than 0."""
        self.hooks.passes.before_training = self.groups.begin_pass
        self.hooks.stash = self.groups.stash
        self._listeners = list(callbacks)
        if folder is not None and ranks.first:
            _open_log(self, folder, controller)
        self._steps_before = 0
        self._incubated = False
        self._first = ranks.first

    def start(self, evaluate: Evaluate) -> GrowthStep:
        """Scores the untrained model and lets the controller plant before the first epoch; calling it is optional.

        ``evaluate``, TypeError and ValueError as in :meth:`step`; RuntimeError if anything was trained before.
        """
        if self.env is not None or self.groups.steps:
            raise RuntimeError("grower.start() comes once, before the first epoch is trained")
        self.config = resolved(self.config, self.horizon)  # one more decision
        self.started = True
        probe_untrained(self.hooks, evaluate)
        return _decide(self, evaluate)

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
        require_trained(self.hooks, self.groups, self._steps_before, self._incubated)
        return _decide(self, evaluate, 1, training)

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

        Nothing of the training changes. Returns needs in units of the loss by slot, see the page on how a step runs;
        slots without two layers between source and sink have none.

        Args:
            first: computes the mean loss of a batch with the model in training mode.
            second: computes that of another batch.

        Raises:
            ConfigError: a loss does not depend on the model.
        """
        from esper.grower.need import measure_need  # few loops measure it

        env = self._opened()
        needs = measure_need(self.hooks, first, second)
        env.note_needs(needs)
        return needs

    def follow(self, average: nn.Module) -> None:
        """Lets a later ``average`` of the weights use the seeds. Raises ConfigError for one of another network."""
        require_open(self.groups)
        self.hooks.follow(network_of(average, self.model))

    def summary(self) -> GrowthSummary:
        """Returns what has grown so far, or until :meth:`finish`. Raises RuntimeError before the first :meth:`step`."""
        from esper.grower.summary import summary_of

        return summary_of(self)

    @outside_inference()
    def finish(self, merge: bool = False, quiet: bool = False) -> nn.Module:
        """Ends growth, prints the :meth:`summary` and returns the model with its kept seeds as ordinary submodules.

        Seeds that are not kept are removed. The groups of kept seeds stay in the optimizer, so that the model can be
        trained on. With ``merge``, kept seeds become parts of the layers where that is possible, as in ``esper.plain``:
        widenings more units, LoRAs other weights. Then the optimizer has the new parameters in place of the old ones,
        with their state; a warning says which seeds stay, and why. With ``quiet``, nothing is printed.

        Raises RuntimeError if :meth:`step` was never called, or growth has ended.
        """
        from esper.grower.finish import end_growth

        end_growth(self, self.groups.optimizer if merge else None)
        if self._first and not quiet:
            text = str(self.summary())
            with suppress(OSError, ValueError):  # standard output may be closed, and growth has ended
                print(text)
        return self.model

    def close(self) -> None:
        """Ends growth without keeping anything: all seeds and hooks are removed from the model and the optimizer."""
        from esper.grower.finish import discard

        discard(self)

    @property
    def kept(self) -> dict[str, str]:
        """Blueprints of the seeds that were kept beside the layers, by slot: by its site if ``sites`` has no names."""
        return self.record.kept(self.hooks.sites)

    @property
    def merged(self) -> dict[str, tuple[str, ...]]:
        """Blueprints of the seeds that became a part of the layers before the end, in order, by slot."""
        return {self.record.names[name]: tuple(blueprints) for name, blueprints in self.merger.merged.items()}

    def __repr__(self) -> str:
        return f"Grower({type(self.model).__name__}, {self.record.shown}, epoch {self.epoch} of {self.horizon})"

    def _repr_html_(self) -> str:
        from esper.grower.summary import html_of

        return html_of(self)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of growth: load it before those of the model, which may be wider, and of the optimizer."""
        state: dict[str, Any] = {
            "format": FORMAT,
            "epoch": self.epoch,
            "started": self.started,
            "arguments": arguments_of(self),
            "log": None if self.log is None else self.log.state_dict(),
        }
        if self.env is not None:
            state["env"] = self.env.state_dict()
            state["seeds"] = self.record.state_dict()
            state["controller"] = self.controller.memory_state()
        return state

    @outside_inference()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from ``state``, in a new Grower with the same arguments; plants the seeds with their groups.

        Raises ConfigError if this Grower has been stepped, or the state does not fit it.
        """
        if self.env is not None or self.epoch:
            raise ConfigError("load_state_dict needs a new Grower, before its first step")
        check_state(state, arguments_of(self))
        if state["started"]:
            self.config = resolved(self.config, self.horizon)
            self.started = True
        if "env" in state:
            _take_layers(self, state["env"]["hosts"])
            self._opened(state["env"]["first"]).load_state_dict(state["env"])
            self.record.load_state_dict(state["seeds"])
            self.controller.load_memory_state(state["controller"])
        self.epoch = state["epoch"]
        if self.log is not None and state["log"] is not None:
            self.hooks.passes.before_first = None
            self.log.resume(state["log"], self.config, self.epoch)

    @outside_inference()
    def _opened(self, saved: Mapping[str, Any] | None = None) -> LoopEnv:
        """Returns the env, made by the first call, after a pass; ``saved``: sizes that a saved Grower began with."""
        require_open(self.groups)
        if self.env is not None:
            return self.env
        self.env = env = _env_of(self, saved)
        self.controller: Controller = controller_for(self._loaded_controller, self.config, env, env.run_seed)
        self.controller.begin()
        if saved is None and self.log is not None:
            self.log.start(env, tuple(self.record.names[slot] for slot in env.action_spec.slots))
        return env


def _open_log(grower: Grower, folder: str | Path, controller: str | OwnController) -> None:
    # Only a loop that has a folder needs to know of files of runs.
    from esper.grower.log import LoopLog

    grower.log = log = LoopLog(folder, type(grower.model).__name__, controller, grower.points)
    grower._listeners.insert(0, log.emit)
    grower.hooks.passes.before_first = lambda: log.create(grower.config)


def _decide(
    grower: Grower,
    evaluate: Evaluate,
    epochs: int = 0,
    training: tuple[float, float] | None = None,
) -> GrowthStep:
    """Lets the controller act on the model as it is after ``epochs`` more epochs."""
    if grower.hooks.passes.last is None:  # the loop may call parts of the model, and evaluate the model itself
        probe_untrained(grower.hooks, evaluate)
    env = grower._opened()
    # One decision followed each earlier epoch, and one came before the first if the loop was started early.
    decisions = grower.epoch + grower.started * epochs
    env.backend.score(evaluate, decisions, grower.epoch + epochs, training)  # first, because it may raise
    if epochs:
        env.note_updates(grower.groups.steps - grower._steps_before)
    grower._incubated = False
    with outside_inference():
        observation = env.end_epoch() if decisions else env.begin()
        grower.epoch += epochs
        grower._steps_before = grower.groups.steps
        before = slots_of(env, grower.record)
        if not env.done[0]:
            env.play(grower.controller, observation)
    return report(env, grower.epoch, grower.record, before)


def _emit(grower: Grower, event: Event) -> None:
    # The first decision of a loop that was not started early follows its first epoch.
    event = grower.record.note(event, 1 - grower.started)
    if grower.config.telemetry.of_hosts:
        for listen in grower._listeners:
            listen(event)


def _env_of(grower: Grower, saved: Mapping[str, Any] | None) -> LoopEnv:
    """Makes the env of a model whose sites have run; ``saved`` are the sizes with which a saved Grower began."""
    require_reached(grower.hooks)
    first = None
    spec = None
    if saved is None:
        infer_layouts(grower.hooks)
    else:
        first, spec = first_choices(saved)
    backend = LoopBackend(
        grower.hooks,
        grower.groups,
        grower.merger,
        grower.blueprints,
        grower.config,
        grower.points,
        grower.governed,
        spec,
    )
    setting = replace(
        grower._setting,
        inputs=grower.hooks.passes.inputs,
        learning_rate=first_rate(grower.groups.optimizer),
    )
    return LoopEnv(
        backend,
        grower._baseline,
        partial(_emit, grower),
        first,
        setting,
    )


@outside_inference()
def _take_layers(grower: Grower, hosts: Mapping[str, Any]) -> None:
    """Gives a model the widths and the places that a saved one had."""
    grower.merger.load_state_dict(hosts["grown"])
    for name, count in hosts["channels"].items():
        between = None
        if name in hosts["between"]:
            between = Between(**hosts["between"][name])
        layout = Layout(*hosts["layouts"][name])
        grower.hooks.place(name, count, layout, between)
