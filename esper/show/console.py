"""The run as plain lines for a terminal, a file or a CI log."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rich.console import Console

from esper.agents.spec import ControllerSpec
from esper.data.names import DRAWN
from esper.show.view import MAX_HISTORY, RunView
from esper.telemetry import event as events
from esper.telemetry.event import Event
from esper.telemetry.score import ScoreUnit
from esper.telemetry.sink import Sink
from esper.telemetry.text import count, duration, number

FIRST_PART = 0.1
"""Share of the first round that has to pass before the remaining time is estimated."""


WORTH_TELLING = 10.0
"""Shortest estimate of the remaining time that is printed, seconds."""


class TerminalConsole(Console):
    """A console for names of all kinds: ``:v:`` stays as it is, and is no emoji.

    It raises BrokenPipeError if its reader goes away (`esper run | head`), instead of exiting.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(emoji=False, **options)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError("the reader of the output has closed it")


class ConsoleSink(Sink):
    """Prints a header, the baseline, and a line per round, rollback, cut seed and warning; ASCII only.

    Args:
        console: where to print.
        clock: seconds from any starting point.
    """

    tells_epochs = True

    def __init__(self, console: Console, clock: Callable[[], float] = time.perf_counter) -> None:
        self._console = console
        self._view = RunView(MAX_HISTORY, clock)
        self._timed = False

    def handle(self, event: Event) -> None:
        self._view.handle(event)
        left = self._view.pace.seconds_left()
        eta = ""
        if left:
            eta = f"  about {duration(left)} left"
        for line in lines(event, self._view, eta):
            self.print(line)
        if isinstance(event, events.EpochCompleted):
            self._tell_epoch(event, left)

    def _tell_epoch(self, event: events.EpochCompleted, left: float | None) -> None:
        """Prints the time that all rounds take, once it is known; of a run with one host, every tenth of its epochs."""
        view = self._view
        started = view.begun
        # The first epochs of a process are slower than the others.
        known = left is not None and left >= WORTH_TELLING and view.done == 0 and view.part_of_round >= FIRST_PART
        if known and not self._timed:
            self._timed = True
            self.print(f"all rounds: about {duration(left or 0.0)} left")
        if started is None or started.n_envs * started.rounds != 1 or not self.tells_epochs:
            return
        score = view.score.while_training
        if event.epoch % max(1, started.episode_length // 10) == 0:
            self.print(
                f"epoch {event.epoch}/{started.episode_length}  "
                f"validation {score.name} {score.value(event.validation_accuracy, 1)}"
            )

    def start(self) -> None:
        """Does nothing: lines need no preparation, as progress does."""

    def print(self, line: str) -> None:
        """Prints a line of text."""
        # Verbatim: a slot or a path in brackets is not markup. Long lines are wrapped only in a terminal.
        self._console.print(line, markup=False, highlight=False, soft_wrap=not self._console.is_terminal)


def lines(event: Event, view: RunView, eta: str = "") -> list[str]:
    """Returns the lines to print for one event, which ``view`` already contains; ``eta`` ends some of them."""
    match event:
        case events.RunStarted():
            return _header(event)
        case events.BaselineMeasured() if event.accuracy:
            hosts = count(event.episodes, "host")
            score = view.score.while_training
            final = score.value(event.accuracy[-1], 1)
            return [f"baseline: {hosts} left alone, final validation {score.name} {final}"]
        case events.RunResumed():
            resumed = f"resumed after round {event.round}/{event.rounds}"
            if event.epochs:
                resumed += f", {count(event.epochs, 'epoch')} into the next round"
            warnings = [f"  warning: {warning}" for warning in event.warnings]
            return [resumed, *warnings, *_execution(event)]
        case events.StepsNotCaptured():
            return [f"steps left to PyTorch: {event.reason}"]
        case events.RoundCompleted():
            return [_round(event, view, eta)]
        case events.PolicyUpdated():
            return [
                f"  learned: KL {event.approx_kl:.3f}  clipped {event.clip_fraction:.0%}  entropy {event.entropy:.2f}  "
                f"explained variance {event.explained_variance:.2f}  {event.env_steps:,} env steps"
            ]
        case events.AgentValidated():
            return [f"  {validated(event, view.score)}"]
        case events.AnomalyDetected():
            return [f"  warning, round {event.round}: {event.found}; try: {event.advice}"]
        case events.ArmPlayed():
            return [played(event, view) + eta]
        case events.GovernorRollback() | events.SeedCut():
            place, what, why = incident(event)
            return [f"{what}: {place}: {why}"]
    return []


def plan(event: events.RunStarted) -> list[str]:
    """Returns what a run will do, and its words."""
    hosts = count(event.rounds * event.n_envs, "host")
    epochs = count(event.episode_length, "epoch")
    if event.task in DRAWN:
        epochs = f"at most {epochs}"
    # The rounds of an agent that learns have no hosts left alone; it is compared with some at the end.
    beside = "" if ControllerSpec.of(event.controller).learns else ", beside the same hosts left alone"
    lines = [
        f"{event.controller} will grow {hosts} on {event.task}: {count(event.rounds, 'round')} of {event.n_envs}, "
        f"{epochs} each{beside}",
        "host: a network in training; slot: a place where a seed (new layers) is tried; kept seeds stay",
    ]
    if event.tier is None:
        lines.append("simulated: no network is trained; scores follow a law that Esper made up")
    return lines


def size(event: events.RunStarted) -> list[str]:
    """Returns the lines about how much the run is to do."""
    rounds = count(event.rounds, "round")
    hosts = count(event.n_envs, "host")
    epochs = count(event.episode_length, "epoch")
    host = f"host: {event.host_parameters:,} parameters"
    if event.task in DRAWN:
        epochs = f"at most {epochs}"
        host = "hosts differ in size"
    return [
        f"{rounds} of {hosts}, {epochs} each",
        f"{host}, slots {', '.join(event.slots)}",
    ]


def _header(event: events.RunStarted) -> list[str]:
    header = [
        *plan(event),
        f"seed {event.seed}; {size(event)[1]}",
        f"blueprints: {', '.join(event.blueprints)}",
        *_execution(event, f", {event.precision}"),
    ]
    if event.micro_batches > 1:
        split = f"each batch is split into {event.micro_batches} micro-batches"
        header.append(f"{split}; BatchNorm uses the statistics of each")
    header.append(f"run folder: {event.folder}")
    return header


def _execution(event: events.RunStarted | events.RunResumed, precision: str = "") -> list[str]:
    """Returns the lines about how steps are executed; ``precision`` follows the tier."""
    execution = []
    if event.tier is not None:
        steps = f"steps: {event.tier}{precision}"
        if event.tier_refused is not None:
            steps += f"; a faster tier cannot be used: {event.tier_refused}"
        execution.append(steps)
    if event.cublas_workspace is not None:
        execution.append(f"cuBLAS workspaces: {event.cublas_workspace}")
    return execution


def _round(event: events.RoundCompleted, view: RunView, eta: str) -> str:
    """Returns the score of grown hosts beside hosts left alone, as far as it was measured, and the speed."""
    found = view.compared(event)
    score = found.score
    result = f"{found.split} {score.name}: grown {score.value(found.grown, 1)}"
    if found.other is not None:
        gain = score.difference(found.grown - found.other, 1)
        result += f"  {found.name} {score.value(found.other, 1)}  ({gain})"
    back = ""
    if event.rollbacks:
        back = f"{count(event.rollbacks, 'rollback')}  "
    return f"round {event.round}/{event.rounds}  {result}  {event.fossils:.1f} kept per host  {back}{rates(event)}{eta}"


def played(event: events.ArmPlayed, view: RunView) -> str:
    score = view.score.value(event.test_accuracy, 1)
    return f"comparing, round {event.round}/{event.rounds}: {event.controller}, test {view.score.name} {score}"


def validated(event: events.AgentValidated, score: ScoreUnit) -> str:
    """Returns the mean return of an agent on its validation hosts, and those of rules."""
    best = "the best so far"
    if event.best_round != event.round:
        best = f"that of round {event.best_round} is kept"
    achieved = score.rewards(event.mean_return)
    words = f"agent of round {event.round}: discounted return {achieved} on validation hosts, {best}"
    if event.rules:
        rules = [f"{name} {score.rewards(level)}" for name, level in event.rules.items()]
        words += f"; rules: {', '.join(rules)}"
    return words


def rates(event: events.RoundCompleted) -> str:
    """Formats the throughput of a round; simulated hosts have no images."""
    epochs = f"{event.epochs_per_second:,.1f} epochs/s"
    if not event.samples:
        return epochs
    return f"{event.images_per_second:,.0f} images/s, {epochs}"


def incident(event: Event) -> tuple[str, str, str]:
    """Describes an event of one host: place, what happened, details."""
    match event:
        case events.GovernorRollback():
            what = "rollback"
            limits = f"{number(event.value, 4)}, limit {number(event.threshold, 4)}"
            why = f"{event.reason} ({limits}), back to epoch {event.restored_epoch}"
        case events.SeedCut():
            what = "seed cut"
            why = f"{event.blueprint} in {event.slot} became non-finite"
        case events.ActionTaken():
            what = " ".join(filter(None, (event.op, event.blueprint, event.slot)))
            why = ""
            if not event.accepted:
                why = f"refused: {event.reason}"
        case _:
            raise TypeError(f"{type(event).__name__} is not an event of one host")
    return f"round {event.episode + 1}, host {event.env}, epoch {event.epoch}", what, why
