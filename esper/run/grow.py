"""Growing one host of a task: the entry point for growing your own network."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from esper.agents.make import OwnController
from esper.agents.needs import default_controller, with_needs, with_price
from esper.agents.spec import ControllerSpec
from esper.config import ConfigError, TrainingConfig, read_toml
from esper.config.resolved import ResolvedConfig
from esper.core.action import Op
from esper.core.units import LayerUnits, layer_units
from esper.data.facts import BEST_HOST
from esper.data.task import Task
from esper.env.make import EnvMaker
from esper.env.reporting import standing_of
from esper.env.vector_env import GrowthVectorEnv
from esper.files import checkpoint
from esper.files.atomic import given_path
from esper.files.claim import claimed
from esper.files.grown_host import committed_network, export
from esper.files.run_folder import CONFIG, EVENTS, RunFolder
from esper.hosts.graft import GraftedHost
from esper.hosts.grown import GrownHost
from esper.hosts.sources import SitePath
from esper.run.experiment import Experiment
from esper.run.grown import Grown
from esper.run.rollout import one_thread
from esper.run.telemetry import RunSummary
from esper.show.life import HostLife, best_life
from esper.show.live import is_watched, progress_sink
from esper.show.view import RunView
from esper.telemetry.event import (
    ActionTaken,
    BaselineMeasured,
    EpisodeCompleted,
    EpochCompleted,
    Event,
    GovernorRollback,
    RunResumed,
)
from esper.telemetry.event_log import EventLog
from esper.telemetry.hub import Sink
from esper.telemetry.seed_history import Life, TriedSeed
from esper.training.rng import seeded
from esper.training.validate import committed_configuration, evaluate

logger = logging.getLogger(__name__)


@one_thread()
def grow(
    task: Task,
    controller: str | OwnController | None = None,
    epochs: int | None = None,
    config: TrainingConfig | Mapping[str, Any] | None = None,
    *,
    folder: Path | str | None = None,
    callbacks: Sequence[Callable[[Event], None]] = (),
    alone: bool = True,
    progress: bool | None = None,
    price: float | None = None,
) -> Grown:
    """Trains a host of ``task`` for ``epochs`` while ``controller`` grows it, then trains the same host alone.

    Ctrl-C ends it at the end of the epoch and returns what has grown so far; a second one is raised at once. With
    ``folder``, the same call continues from there, to the same bits.

    Args:
        task: what to train on, and the host; ``esper.graft`` makes one of any network.
        controller: ``advisor``, ``heuristic``, ``plateau``, ``schedule:FILE.toml``, ``random``, ``pretrained`` (an
            agent that comes with Esper), or ``checkpoint:PATH`` of an agent that learned on a host with blueprints of
            the same names; or a custom one, as ``path.py:function`` or a callable that makes a controller for an env.
            None: ``advisor`` if slots widen layers and the loss is cross-entropy, otherwise ``heuristic``.
        epochs: length of the episode; None: the config's, or the task's.
        config: all other values, as a TrainingConfig or its tables in dicts; the task fills in its sizes. None: the
            defaults, with the no-growth baseline measured on one host.
        folder: a run folder, as that of ``esper run``: new, or of an interrupted call with the same arguments. None:
            nothing is left on disk.
        callbacks: receive every event of the grown host, such as ``EpochCompleted``. One that raises is dropped.
        alone: whether to train the same host without seeds as well, which takes about as long again.
        progress: whether to show the progress; None: on a terminal and in a notebook.
        price: pp that a doubling of the parameters has to bring, as ``reward.price`` in the mode ``priced``.

    Raises:
        ConfigError: the controller is unknown or does not fit, the data cannot serve the sizes, or ``folder`` holds
            something else.
        KeyboardInterrupt: Ctrl-C came before the first epoch, or twice.
    """
    if controller == "none":
        raise ConfigError("controller none grows nothing: name another one; its result includes the host left alone")
    if config is None:
        config = TrainingConfig().with_values(env={"baseline_episodes": 1})
    if not isinstance(config, TrainingConfig):
        config = TrainingConfig.parse(dict(config))
    reason = ""
    if controller is None:
        with seeded(0):  # the weights are not used
            host = task.new_host(config.env.slots or task.slots)
        widens = any(site.has_source for site in host.sites)
        missing = "a task with classes" if task.guessed is None else ""
        controller, reason = default_controller(config, widens, missing)
    spec = ControllerSpec.of(controller).check()
    # One round of one host is one grown host.
    values = {"n_envs": 1}
    if epochs is not None:
        values["episode_length"] = epochs
    settings = config.with_values(env=values, run={"controller": spec.name, "rounds": 1})
    settings = with_price(settings, price, controller, reason)
    settings = with_needs(spec.name, settings)
    if not settings.telemetry.of_hosts:
        raise ConfigError("esper.grow tells the fate of seeds by their events: telemetry.level must be normal or debug")
    watch = Watch(alone)
    sinks: list[Sink] = [watch, *map(CallbackSink, callbacks)]
    with ExitStack() as stack:
        place = given_path(stack.enter_context(TemporaryDirectory()) if folder is None else folder)
        if progress is None:
            progress = is_watched()
        if progress:
            sinks.append(stack.enter_context(closing(progress_sink())))
        watch.experiment = _opened(settings, place, sinks, task, controller)
        summary, interrupted = _run(watch.experiment)
        return _result(watch.experiment, summary, interrupted, None if folder is None else place)


@dataclass(eq=False)
class CallbackSink(Sink):
    """Passes events on to a function."""

    callback: Callable[[Event], None]

    def handle(self, event: Event) -> None:
        self.callback(event)


@dataclass(eq=False)
class Watch(Sink):
    """Warns while a host grows, and ends the run with the grown host unless it is to be trained ``alone``, too."""

    alone: bool
    experiment: Experiment = field(init=False)

    def handle(self, event: Event) -> None:
        match event:
            case GovernorRollback():
                logger.warning("training diverged: %s", _rollback(event))
            case EpisodeCompleted() if not self.alone:
                self.experiment.stop()
            case RunResumed() if not self.alone and self._grown():
                self.experiment.stop()

    def _grown(self) -> bool:
        """Whether the host had grown to its end before the run was resumed."""
        rollout = self.experiment.trainer.agent.rollout
        return rollout.begun and rollout.over


def _opened(
    settings: TrainingConfig,
    place: Path,
    sinks: Sequence[Sink],
    task: Task,
    controller: str | OwnController,
) -> Experiment:
    """Returns the run in ``place``, or a new one, also for a run there of which nothing was saved.

    Raises ConfigError if the one there has another config, or is finished.
    """
    saved = bool(checkpoint.files(place))
    if saved or RunFolder.holds_nothing_saved(place):
        _require_same(settings, place, task)
    if not saved:
        _drop_unsaved(place)
        return Experiment(settings, place, sinks, task, controller=controller)
    if checkpoint.newest(place).state["finished"]:
        raise ConfigError(
            f"{place} is finished, and holds the grown host: load it with esper.load_host({str(place / BEST_HOST)!r}, "
            "model=...), or give a new folder to grow another"
        )
    return Experiment.resume(place, sinks, task, controller)


def _drop_unsaved(place: Path) -> None:
    """Removes the files of a run that ended before its first checkpoint, if no other process writes them."""
    if not RunFolder.holds_nothing_saved(place):
        return
    with claimed(place):
        for file in place.iterdir():
            file.unlink()


def _require_same(settings: TrainingConfig, place: Path, task: Task) -> None:
    """Raises ConfigError if the run in ``place`` has another config than ``settings``."""
    asked = EnvMaker.of(settings, task).config.model_dump(mode="json", exclude_none=True)
    recorded = TrainingConfig.parse(read_toml(place / CONFIG)).model_dump(mode="json", exclude_none=True)
    changed: list[str] = []
    for name, values in asked.items():
        changed += [f"{name}.{key}" for key, value in values.items() if value != recorded[name].get(key)]
    if changed:
        raise ConfigError(
            f"{place} was grown with another {', '.join(changed)}: give the same arguments to continue, or a new folder"
        )


def _run(experiment: Experiment) -> tuple[RunSummary | None, bool]:
    """Runs until the end or an interrupt; returns the summary, None without one, and whether Ctrl-C came.

    Raises KeyboardInterrupt if nothing has grown yet, or the host is in the middle of an epoch.
    """
    try:
        summary = experiment.run()
    except KeyboardInterrupt:  # before the host had grown to its end
        trainer = experiment.trainer
        if trainer.env.state.epoch[0] < 1 or not trainer.collector.consistent:
            raise
        return None, True
    # The watch stops runs, too, which is no Ctrl-C.
    return summary, summary.interrupted and not experiment.trainer.stopping


def _result(
    experiment: Experiment,
    summary: RunSummary | None,
    interrupted: bool,
    folder: Path | None,
) -> Grown:
    config = experiment.config
    env = experiment.trainer.env
    assert isinstance(env, GrowthVectorEnv)
    lost = [f"{name} failed and was dropped: {why}" for name, why in experiment.telemetry.dropped_sinks().items()]
    view = RunView()
    for event in EventLog(experiment.folder / EVENTS).read()[0]:
        view.handle(event)
    training = env.training[0]
    network = committed_network(training)
    measured = evaluate(training, training.task.test, [committed_configuration(training)])
    accuracy = float(measured.accuracy[0])
    score = training.task.score_shown
    host = training.host
    paths = host.paths if isinstance(host, GraftedHost) else {}
    tried = _tried(view, env, config, paths)
    rollout = experiment.trainer.agent.rollout
    alone: float | None = None
    if summary is not None and summary.comparisons:
        alone = score.of(summary.comparison.mean_b)
    elif summary is not None and folder is not None:
        export(network, folder / BEST_HOST, {"test_accuracy": accuracy})
    return Grown(
        network=network,
        accuracy=score.of(accuracy),
        alone=alone,
        seeds=_kept(network, tried),
        refusals=_refusals(view),
        host_parameters=env.host_parameters,
        parameters=sum(parameter.numel() for parameter in network.parameters()),
        tried=tried,
        history=tuple(view.of(EpochCompleted)),
        warnings=(*_divergence(view, config), *lost),
        controller=config.run.controller,
        epochs=env.horizon,
        interrupted=interrupted,
        folder=folder,
        resolution=100 / float(training.task.counts.sum()),
        score=score,
        life=_life(view, config),
        layers=_layers(env, paths),
        reason="".join(getattr(rollout.controller, "reasons", [])),
    )


def _layers(env: GrowthVectorEnv, paths: Mapping[str, str]) -> tuple[LayerUnits, ...]:
    """Returns the layers that can be widened in slots between two modules, whose ``paths`` are known by slot."""
    first = dict(zip(env.action_spec.slots, env.choices.widths.tolist(), strict=True))
    found = []
    for name, before in first.items():
        path = SitePath.parse(paths[name]) if name in paths else SitePath("")
        if path.source is None:
            continue
        layer = layer_units(env.training[0].site_by_name[name], path.source, path.sink, before)
        if layer is not None:
            found.append(layer)
    return tuple(found)


def _life(view: RunView, config: ResolvedConfig) -> HostLife | None:
    """Returns the life of the host; None if it was interrupted."""
    host = best_life(view)
    if host is None:
        return None
    return replace(host, title=f"A host of {config.task.name}")


def _kept(network: GrownHost, tried: Sequence[TriedSeed]) -> dict[str, str]:
    """Returns the blueprints of the seeds that were kept, by slot; those of a slot that grew again in a row."""
    kept: dict[str, list[str]] = {}
    for seed in tried:
        if seed.merged is not None and seed.kept:
            kept.setdefault(seed.slot, []).append(seed.blueprint)
    for slot, beside in network.kept.items():
        kept.setdefault(slot, []).append(beside.blueprint)
    return {slot: " + ".join(blueprints) for slot, blueprints in kept.items()}


def _refusals(view: RunView) -> tuple[str, ...]:
    """Returns the distinct reasons why seeds could not be planted."""
    refused = [event for event in view.of(ActionTaken) if event.op == Op.GERMINATE.name and not event.accepted]
    return tuple(dict.fromkeys(event.reason for event in refused))


def _tried(
    view: RunView,
    env: GrowthVectorEnv,
    config: TrainingConfig,
    paths: Mapping[str, str],
) -> tuple[TriedSeed, ...]:
    """Returns the seeds that were planted, with their paths; those that are still there with what keeps them from
    passing on."""
    life = view.lives.get((0, 0), Life(0, 0))  # empty after a full disk
    for slot, reason in standing_of(env, config.run.controller).items():
        if slot in life.present:  # a germination may be missing in the log, such as after a full disk
            life.present[slot].standing = reason
    for seed in life.seeds:
        seed.path = paths.get(seed.slot, "")
    return tuple(life.seeds)


def _divergence(view: RunView, config: ResolvedConfig) -> list[str]:
    """Describes signs that training diverged, with what to try."""
    signs = list(map(_rollback, view.of(GovernorRollback)))
    for event in view.of(BaselineMeasured):
        first = event.loss[0]
        last = event.loss[-1]
        if not last <= first:  # also if one of them is not a number
            signs.append(f"a host left alone ends with loss {last:.3g}, and had {first:.3g} before training")
    if signs:
        rate = config.task.learning_rate
        signs.append(f"lower the learning rate (task.learning_rate is {rate:g}), or normalise the inputs")
    return signs


def _rollback(event: GovernorRollback) -> str:
    loss = "a loss that is not finite"
    if math.isfinite(event.value):
        loss = f"loss {event.value:.3g}"
    return f"epoch {event.epoch}: {event.reason}, {loss}; the host was restored as of epoch {event.restored_epoch}"
