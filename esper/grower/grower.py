"""Growth inside a training loop of one's own: the slots, the controller and the lifecycle, without the training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from esper.agents.controller import Controller
from esper.agents.make import OwnController, controller_for, loaded
from esper.agents.spec import ControllerSpec
from esper.config import ConfigError, TrainingConfig
from esper.config.resolved import ResolvedConfig
from esper.env.catalog import BlueprintCatalog
from esper.env.reporting import Reporter
from esper.grower.averages import given_averages
from esper.grower.backend import LoopBackend
from esper.grower.checks import (
    FORMAT,
    check_arguments,
    check_blueprints,
    check_state,
    plain_model,
    require_trained,
)
from esper.grower.env import Counted, LoopEnv
from esper.grower.finishing import finish
from esper.grower.hooks import SiteHooks
from esper.grower.looking import look
from esper.grower.optimizer import SeedGroups
from esper.grower.report import GrowthStep, report, slots_of, why_nothing
from esper.grower.scores import Evaluate
from esper.hosts.between import Between
from esper.hosts.graft import Sites, check_sites, named_sites
from esper.hosts.host import row_major
from esper.hosts.layout import Layout
from esper.hosts.seed_hook import require_finished
from esper.hosts.site_path import SitePath
from esper.hosts.widen import warn_unmerged
from esper.seeds.blueprints import BLUEPRINTS, BlueprintRegistry
from esper.spaces.action import Op
from esper.telemetry.event import ActionTaken, Event

if TYPE_CHECKING:
    from esper.grower.log import LoopLog

logger = logging.getLogger(__name__)


class Grower:
    """Grows ``model`` while a loop of your own trains it: call :meth:`step` after each epoch, then :meth:`finish`.

    The loop, the loss, the optimizer, its schedule and the data stay yours. Until a seed is blended in, the model
    computes the same bits as without growth: a seed first learns beside it, straight through, from the same backward
    pass. Seeds are planted from the first :meth:`step` on, so the first epoch trains the model alone, unless
    :meth:`start` is called before it.

    Args:
        model: the network. Hooks are registered on it; its parameters and ``state_dict`` stay as they are.
        sites: paths of submodules, or ``"auto"``, which needs ``example``; as in :func:`esper.graft`.
        topology: layout of the sites' outputs, see :func:`esper.graft`; None: the layout of each is found in a pass of
            the last batch in eval mode, before the first decision.
        incubation: how a seed learns before it is blended in: ``ste``, straight through, in the loop's own pass, or
            ``shadow``, in passes of its own that :meth:`incubate` makes, which cost more and are more accurate.
        scheduler: a learning-rate schedule of ``optimizer``, or several. Those of torch, transformers and timm are
            found without it; one of your own needs an attribute ``optimizer``.
        lr_factor: learning rate of a seed in units of that of the layer that it sits on: of the parameter group that
            holds most of the submodule's parameters, else of the one that holds the nearest parameter before it.
        warmup_steps: number of steps after planting over which the learning rate of a seed rises from near zero.
        weight_decay: weight decay of seeds.
        points: percentage points in one unit of the score: 100 for fractions (0 to 1), 1 for per cent. Gates, rewards
            and controllers compare percentage points.
        governor: whether to roll the model, its kept seeds and their optimizer state back to a snapshot when a score or
            a weight is not finite, or the loss collapses or diverges. It keeps two snapshots.
        baseline: scores after each of the ``horizon`` epochs of a loop without growth, which controllers compare with;
            None: the scores of this model without its seeds.
        config: thresholds of gates, limits on seeds and the run seed, as a TrainingConfig or as its tables in dicts;
            None: the defaults. Unless ``env.at_once`` is false, seeds that are zero at birth, such as widenings, are
            a part of the model in the epoch after they are planted, and kept.
        blueprints: what seeds can be; None: the built-in ones.
        callbacks: receive every event.
        folder: a new or empty folder for the events, which `esper show` and `esper report` read; rank 0 writes it.
        averages: averages of the model's weights that were made before, or copies of the model that the loop averages:
            they use the seeds that the model uses, and get copies of those that are kept. None: torch's
            ``AveragedModel`` and others of that form are found.
        example: a few inputs of the model, for ``sites="auto"``.

    Raises:
        ConfigError: a site, the controller, the optimizer or a number does not fit; the model or a part around a site
            is compiled; another Grower grows the model.
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
        scheduler: object = (),
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
    ) -> None:
        model, ranks = plain_model(model)
        named = named_sites(model, sites, example)
        check_sites(model, named, topology)
        require_finished(model)
        followers = given_averages(averages, model)
        if warmup_steps < 0:
            raise ConfigError(f"warmup_steps is {warmup_steps}; it must not be negative")
        check_arguments(horizon, baseline, incubation, ranks, lr_factor=lr_factor, points=points)
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
        self.blueprints = (blueprints or BLUEPRINTS).copy()
        self.paths = {name: SitePath.parse(text) for name, text in named.items()}
        self.slots = row_major(named)
        check_blueprints(self.config.env.blueprints, self.blueprints, self.paths, topology)
        self._baseline = None if baseline is None else tuple(points * score for score in baseline)
        self.incubation = incubation
        self.governed = governor
        self.groups = SeedGroups(
            model,
            self.paths,
            optimizer,
            scheduler,
            lr_factor,
            weight_decay,
            self.config.task,
            ranks,
            warmup_steps,
        )
        self.hooks = SiteHooks(model, named, topology, straight_through=incubation == "ste")
        for network in followers:
            self.hooks.follow(network)
        self.epoch = 0
        """Number of epochs trained so far."""
        self.env: LoopEnv | None = None
        self.log: LoopLog | None = None
        """The run folder; None without one, and on ranks other than 0."""
        self.hooks.passes.before_training = self.groups.begin_pass
        self.hooks.put_aside = self.groups.put_aside
        self._listeners = list(callbacks)
        if folder is not None and ranks.first:
            log = _log_in(folder, type(model).__name__, controller, points)
            self.log = log
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
        self._start_early()
        self.hooks.find_sites(evaluate)
        return self._decide(evaluate)

    def _start_early(self) -> None:
        """Lets the controller make as many decisions as there are epochs, the first one before any of them."""
        self.config = _resolved(self.config, self.horizon)
        self.started = True

    def step(self, evaluate: Evaluate) -> GrowthStep:
        """Ends an epoch: scores the model, lets the controller act, and prepares the seeds for the next epoch.

        ``evaluate`` is called once for each network that is compared, such as the model without one of its seeds.

        Raises:
            RuntimeError: the optimizer has not stepped since the last call, or all epochs are over.
            TypeError, ValueError: ``evaluate`` returned something else than finite scores.
        """
        if self.epoch >= self.horizon:
            raise RuntimeError(f"all {self.horizon} epochs are over: call grower.finish(), or raise horizon=")
        require_trained(self.hooks, self.groups, self._steps_before, self._incubated)
        return self._decide(evaluate, epochs=1)

    def _decide(self, evaluate: Evaluate, epochs: int = 0) -> GrowthStep:
        """Lets the controller act on the model as it is after ``epochs`` more epochs."""
        env = self._opened()
        # One decision followed each earlier epoch, and one came before the first if the loop was started early.
        decisions = self.epoch
        if self.started:
            decisions += epochs
        env.backend.score(evaluate, decisions, self.epoch + epochs)  # first, because it may raise
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
        kept = len(self.kept)
        if not kept:
            logger.warning(why_nothing(self.env))
        self.env.backend.host.drop_unkept()
        warn_unmerged(finish(self.hooks, self.groups.optimizer if merge else None))
        self.env.close()
        if self.log is not None:
            parameters = sum(parameter.numel() for parameter in self.model.parameters())
            self.log.finish(self.env, kept, parameters)
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
        """Returns what a loop that continues needs: load it before the optimizer's state, which includes the seeds'."""
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
        check_state(state, self.slots)
        if state["started"]:
            self._start_early()
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
        self.hooks.require_reached()
        if counted is None:
            look(self.hooks)
        config = self.config
        places = [site.place for site in self.hooks.sites.values()]
        spec = BlueprintCatalog.select(self.hooks.topology, places, self.blueprints, config.env.blueprints).spec
        reporter = Reporter(self._emit, spec, config.env, n_envs=1)
        backend = LoopBackend(self.hooks, self.groups, spec, self.blueprints, config, self.points, self.governed)
        env = LoopEnv(config, backend, self._baseline, reporter, counted)
        self.env = env
        self.controller: Controller = controller_for(self._loaded_controller, config, env, env.run_seed)
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


def _log_in(
    folder: str | Path,
    task: str,
    controller: str | OwnController,
    points: float,
) -> LoopLog:
    """Returns the log of a loop; see :class:`LoopLog` for the arguments."""
    # Only a loop that has a folder needs to know of files of runs.
    from esper.grower.log import LoopLog

    return LoopLog(folder, task, controller, points)


def _resolved(config: TrainingConfig, decisions: int) -> ResolvedConfig:
    """Returns the config of one host that makes ``decisions`` decisions and incubates straight through."""
    env = config.env
    chosen = {
        "n_envs": 1,
        "episode_length": decisions,
        "incubation": "ste",
        "slots": None,
        "at_once": env.at_once is not False,
    }
    return ResolvedConfig.parse(config.tables_with({"env": chosen, "run": {"rounds": 1}}))
