"""Hand-written rules for growing a network. They see exactly what a learning controller sees."""

from __future__ import annotations

import math

from esper.agents.controller import EnvView, PerEnvController
from esper.config import ConfigError, Durations
from esper.core.action import Op, nearest_tempo
from esper.core.arrays import Ints
from esper.core.stage import SeedStage

SMALLEST = 1e-6
"""Min price of a seed: a seed of unknown size has a price, too."""


class HeuristicController(PerEnvController):
    """Plants early, blends what its trial has shown to help, keeps what contributes, and replaces the rest.

    - **Plant** in every slot from the start: a seed and its host learn most from one another while both learn fast.
      Seeds that are a part of the host at once come first: nothing has to wait for them.
    - **Blend** a seed when its trial is positive. Until then the host trains as if alone, so trying a seed out
      costs nothing; after that, a useless seed has changed the host.
    - **Compare** seeds whose trials are over at the same time: the one with the largest gain for its price is blended
      first, and those that do not gain beyond their error are removed.
    - **Keep** a seed when its contribution is clear, or after a while positive: one that is not kept is lost.
    - **Remove** a seed that harms, or that has shown nothing for a while, and try another blueprint in its slot.
    - **Start nothing** that cannot be finished: the epochs left have to last for all gates to come.

    Settings are in ``config.heuristic``; durations of gates in the rest of ``config``.
    """

    EPISODE_STATE: tuple[str, ...] = ("kept", "failed")

    def prepare(self) -> None:
        horizon = self.layout.horizon
        self.rule = self.config.heuristic
        self.incubation = Durations.of(self.config, horizon).min_training_epochs
        self.patience = max(self.incubation, math.ceil(self.rule.patience * horizon))
        self.tempo = nearest_tempo(self.rule.ramp * horizon)
        self.kept: list[list[str]] = [[] for _ in range(self.n_envs)]
        """Blueprints of the seeds kept in this episode."""
        self.failed: list[list[list[str]]] = [[] for _ in range(self.n_envs)]
        """Slot and blueprint of each seed that was removed."""

    def begin_episode(self, env: int) -> None:
        self.kept[env] = []
        self.failed[env] = []

    def choose(self, env: int, view: EnvView) -> Ints:
        slots = self.spec.slots
        for slot in slots:
            if view.legal(Op.FOSSILIZE, slot) and self._helps(slot, view):
                self.kept[env].append(view.blueprint(slot) or "")
                return self.spec.encode(Op.FOSSILIZE, slot)

        for slot in slots:
            if not view.legal(Op.PRUNE, slot) or view.slot(slot, "fading"):
                continue
            if self._failed(slot, view):
                self.failed[env].append([slot, view.blueprint(slot) or ""])
                return self.spec.encode(Op.PRUNE, slot)

        ready = [slot for slot in slots if view.legal(Op.ADVANCE, slot) and self._advances(slot, view)]
        if ready:
            return self.spec.encode(Op.ADVANCE, self._first(ready, view))
        return self._plant(env, view)

    def _helps(self, slot: str, view: EnvView) -> bool:
        """True for a seed that contributes clearly, or, when it has to be decided, at all."""
        if not view.slot(slot, "gate_passed"):
            return False
        # Observations are in units of 10 pp, the rule is in pp.
        contribution = 10 * view.slot(slot, "contribution")
        # When it has to be decided, any contribution will do.
        if view.epochs_left <= 1 or self._waited(slot, view):
            return contribution > 0.0
        error = 10 * view.slot(slot, "contribution_error")
        clear = max(self.rule.min_contribution, self.rule.contribution_errors * error)
        return contribution > clear

    def _waited(self, slot: str, view: EnvView) -> bool:
        """True for a seed that has been in its stage for ``patience`` epochs or more."""
        return view.epochs_in_stage(slot) >= self.patience

    def _failed(self, slot: str, view: EnvView) -> bool:
        """True for a seed that does clear harm, or has shown no gain in TRAINING or HOLDING for too long."""
        stage = view.stage(slot)
        if stage is SeedStage.TRAINING:
            hopeless = _below(view, slot, "trial", self.rule.hopeless_errors)
            if self._tried(slot, view) and (hopeless or self._beaten(slot, view)):
                return True
            return self._waited(slot, view) and not self._advances(slot, view)

        if stage is SeedStage.HOLDING:
            if _below(view, slot, "contribution", self.rule.contribution_errors):
                return True
            return self._waited(slot, view) and not self._helps(slot, view)
        return False

    def _beaten(self, slot: str, view: EnvView) -> bool:
        """True for a seed whose trial is not positive beyond its error, if several trials are over."""
        rivals = sum(self._tried(other, view) for other in self.spec.slots)
        return rivals > 1 and not _above(view, slot, "trial", self.rule.rival_errors)

    def _tried(self, slot: str, view: EnvView) -> bool:
        """True for a seed whose trial is over: it has been in TRAINING for as long as G2 requires."""
        return view.stage(slot) is SeedStage.TRAINING and view.epochs_in_stage(slot) >= self.incubation

    def _first(self, ready: list[str], view: EnvView) -> str:
        """Returns the slot whose seed advances first: the first one, or of several in TRAINING the best buy.

        The others are then tried beside that seed, so that what two of them would both do is paid for once.
        """
        if view.stage(ready[0]) is not SeedStage.TRAINING:
            return ready[0]
        tried = [slot for slot in ready if view.stage(slot) is SeedStage.TRAINING]

        def gain_for_price(slot: str) -> float:
            return view.slot(slot, "trial") / self._price(slot, view)

        return max(tried, key=gain_for_price)

    def _price(self, slot: str, view: EnvView) -> float:
        """Returns ln(1 + parameters of the seed / parameters of the host), which the rent of a seed is a multiple of.

        The logarithm lets a large seed pay by a large gain: by the bare parameters, the smallest one would always win.
        """
        blueprint = view.blueprint(slot) or ""
        return max(view.choice(slot, blueprint, "size_share"), SMALLEST)

    def _advances(self, slot: str, view: EnvView) -> bool:
        """True for a seed whose gate would open, unless it is better to wait."""
        return bool(view.slot(slot, "gate_passed")) and self._ready(slot, view)

    def _ready(self, slot: str, view: EnvView) -> bool:
        """True unless a seed in TRAINING lacks a positive trial, or the epochs to be blended and kept."""
        if view.stage(slot) is not SeedStage.TRAINING:
            return True
        return view.epochs_left > self.tempo and _above(view, slot, "trial", self.rule.trial_errors)

    def _may_plant(self, env: int, view: EnvView) -> bool:
        """True if it is not too late for a new seed."""
        return view.epoch <= self.rule.latest * view.horizon

    def _plant(self, env: int, view: EnvView) -> Ints:
        """Plants in the first free slot what promises most there, or WAITs."""
        if not self._may_plant(env, view):
            return self.spec.encode(Op.WAIT)
        possible = self._possible(env, view)
        # Seeds that are a part of the host at once need no more epochs, and come first.
        chosen = [(slot, name) for slot, name in possible if view.choice(slot, name, "at_once")]
        needed = 1 + self.incubation + self.tempo  # epochs from GERMINATE to FOSSILIZE
        if not chosen and view.epochs_left > needed:
            chosen = possible
        if not chosen:
            return self.spec.encode(Op.WAIT)
        slot, name = chosen[0]
        return self.spec.encode(Op.GERMINATE, slot, name, tempo=self.tempo)

    def _possible(self, env: int, view: EnvView) -> list[tuple[str, str]]:
        """Returns the slots and blueprints of seeds that may be planted and have not failed, the best choice first."""
        # Slots with the fewest failures come first.
        failures = [slot for slot, _ in self.failed[env]]
        possible = []
        for slot in sorted(self.spec.slots, key=failures.count):
            for name in self._preferred(env, slot, view):
                failed = [slot, name] in self.failed[env]
                if not failed and view.legal(Op.GERMINATE, slot, name):
                    possible.append((slot, name))
        return possible

    def _preferred(
        self,
        env: int,
        slot: str,
        view: EnvView,
    ) -> list[str]:
        """Returns the blueprints, the most promising first: what was kept elsewhere in this episode, then by size.

        A blueprint that failed in one slot may be the best of another.
        """
        sizes = {name: view.choice(slot, name, "size") for name in self.spec.offers(slot)}
        # Those of size 0 fit once the layer is wider, unless no size is known.
        sizes = {name: size for name, size in sizes.items() if size > 0} or sizes
        from_small = sorted(sizes, key=sizes.__getitem__)
        # The rule's size is a fraction: 0 stands for the smallest blueprint, 1 for the largest.
        first = self.rule.size * (len(from_small) - 1)
        # Of two that are equally near, the smaller one comes first.
        by_size = sorted(from_small, key=lambda name: abs(from_small.index(name) - first))
        # Sorting is stable: blueprints that were kept equally often stay in the order of size.
        return sorted(by_size, key=self.kept[env].count, reverse=True)


def _above(
    view: EnvView,
    slot: str,
    name: str,
    errors: float,
) -> bool:
    """Whether a measurement of a seed is positive by more than this many of its standard errors."""
    return view.slot(slot, name) > errors * view.slot(slot, f"{name}_error")


def _below(
    view: EnvView,
    slot: str,
    name: str,
    errors: float,
) -> bool:
    """Whether a measurement of a seed is negative by more than this many of its standard errors."""
    return view.slot(slot, name) < -errors * view.slot(slot, f"{name}_error")


class NeedController(HeuristicController):
    """Plants where need is largest, if it is above a threshold: where a layer's own weights cannot lower the loss.

    Which seed is planted there, and whether it is blended, kept or removed, is decided as ``heuristic`` does.

    Settings are in ``config.need`` and ``config.heuristic``. Raises ConfigError if need is not measured.
    """

    EPISODE_STATE = (*HeuristicController.EPISODE_STATE, "measured")

    def prepare(self) -> None:
        super().prepare()
        self.measured = [False] * self.n_envs
        """Whether the need of any slot was ever known in this episode: that of layers that have just grown is not."""
        if not self.config.env.need_every:
            raise ConfigError("the controller need plants by what env.need_every measures: set it to 1 or more")

    def begin_episode(self, env: int) -> None:
        super().begin_episode(env)
        self.measured[env] = False

    def choose(self, env: int, view: EnvView) -> Ints:
        slots = self.spec.slots
        if any(view.slot(slot, "need_measured") for slot in slots):
            self.measured[env] = True
        vacant = all(view.stage(slot) is SeedStage.DORMANT for slot in slots)
        if vacant and not self.measured[env]:
            raise ConfigError(
                "the controller need found no need at any slot: it is measured where a layer reads another one, as at "
                "r2 of CNNs, on data in memory; in a loop with esper.Grower, by grower.measure_need() before step()"
            )
        return super().choose(env, view)

    def _possible(self, env: int, view: EnvView) -> list[tuple[str, str]]:
        possible = _by_need(super()._possible(env, view), view)
        return [(slot, name) for slot, name in possible if view.slot(slot, "need") > self.config.need.threshold]


class PlateauController(HeuristicController):
    """Plants only at a plateau: when the best validation accuracy has not risen by more than a margin for a while.

    A plateau begins anew with each seed that is planted, so that a seed is judged before the next one comes. Where need
    is measured, the slot of the largest is planted in. Which seed is planted, and whether it is blended, kept or
    removed, is decided as ``heuristic`` does.

    Settings are in ``config.plateau`` and ``config.heuristic``.
    """

    EPISODE_STATE = (*HeuristicController.EPISODE_STATE, "best")

    def prepare(self) -> None:
        super().prepare()
        rule = self.config.plateau
        self.margin = rule.margin
        self.window = max(rule.min_window_epochs, math.ceil(rule.window * self.layout.horizon))
        """Length of a plateau in epochs."""
        self.best: list[list[float]] = [[] for _ in range(self.n_envs)]
        """Best accuracy (pp) after each epoch since the last seed was planted."""

    def begin_episode(self, env: int) -> None:
        super().begin_episode(env)
        self.best[env] = []

    def choose(self, env: int, view: EnvView) -> Ints:
        if not view.edited:
            self.best[env].append(100 * view.value("best_accuracy"))
        action = super().choose(env, view)
        # A plateau begins anew.
        if action[0] == Op.GERMINATE:
            self.best[env] = self.best[env][-1:]
        return action

    def _may_plant(self, env: int, view: EnvView) -> bool:
        best = self.best[env]
        if len(best) <= self.window:
            return False
        risen = best[-1] - best[-1 - self.window]
        return risen <= self.margin and super()._may_plant(env, view)

    def _possible(self, env: int, view: EnvView) -> list[tuple[str, str]]:
        return _by_need(super()._possible(env, view), view)


def _by_need(
    possible: list[tuple[str, str]],
    view: EnvView,
) -> list[tuple[str, str]]:
    """Returns the slots and blueprints in the order of need, the largest first; without needs, in their order."""
    return sorted(possible, key=lambda seed: view.slot(seed[0], "need"), reverse=True)
