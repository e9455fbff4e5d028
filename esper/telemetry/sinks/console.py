"""The run as plain lines for a terminal, a file or a CI log."""

from __future__ import annotations

from rich.console import Console

from esper.telemetry.event import (
    AnomalyDetected,
    ArmPlayed,
    BaselineMeasured,
    Event,
    GovernorRollback,
    MicroBatchHalved,
    PolicyUpdated,
    PracticeRound,
    RoundCompleted,
    RunResumed,
    RunStarted,
    SeedCut,
    StepsNotCaptured,
)
from esper.telemetry.run_view import RunView
from esper.telemetry.status import accuracies, incident
from esper.telemetry.text import count, duration


class TerminalConsole(Console):
    """A console that raises BrokenPipeError if its reader goes away (`esper run | head`), instead of exiting."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError("the reader of the output has closed it")


class ConsoleSink:
    """Prints a header, the baseline, and a line per round, rollback, cut seed and warning; ASCII only.

    Args:
        console: where to print.
        view: the state of the run, if another sink keeps it up to date; None: this sink does.
    """

    def __init__(self, console: Console, view: RunView | None = None) -> None:
        self._console = console
        self._view = RunView() if view is None else view
        self._owns_view = view is None

    def handle(self, event: Event) -> None:
        if self._owns_view:
            self._view.handle(event)
        match event:
            case RunStarted():
                self._print_header(event)
            case BaselineMeasured():
                hosts = count(event.episodes, "host")
                self._print(f"baseline: {hosts} left alone, final validation accuracy {event.accuracy[-1]:.1f} %")
            case PracticeRound():
                self._print_practice(event)
            case RunResumed():
                within = f", {count(event.epochs, 'epoch')} into the next round" if event.epochs else ""
                self._print(f"resumed after round {event.round}/{event.rounds}{within}")
                for warning in event.warnings:
                    self._print(f"  warning: {warning}")
                self._print_tier(event)
            case StepsNotCaptured():
                self._print(f"steps not captured: {event.reason}")
            case RoundCompleted():
                self._print_round(event)
            case PolicyUpdated():
                self._print_update(event)
            case AnomalyDetected():
                self._print(f"  warning, round {event.round}: {event.found}; try: {event.advice}")
            case ArmPlayed():
                self._print(
                    f"comparing, round {event.round}/{event.rounds}: {event.controller} {event.test_accuracy:.1f} %"
                )
            case GovernorRollback() | SeedCut() | MicroBatchHalved():
                place, what, why = incident(event)
                self._print(f"{what}: {place}: {why}")

    def close(self) -> None:
        """Does nothing: each line is printed when its event arrives."""

    def _print_header(self, event: RunStarted) -> None:
        self._print(f"task {event.task}, controller {event.controller}, seed {event.seed}")
        sizes = (count(event.rounds, "round"), count(event.n_envs, "host"), count(event.episode_length, "epoch"))
        self._print("{} of {}, {} each".format(*sizes))
        self._print(f"host: {event.host_parameters:,} parameters, slots {', '.join(event.slots)}")
        self._print(f"blueprints: {', '.join(event.blueprints)}")
        self._print_tier(event, f", {event.precision}")
        if event.micro_batches > 1:
            self._print(
                f"each batch is split into {event.micro_batches} micro-batches; BatchNorm uses the statistics of each"
            )
        if event.pinned_copies:
            self._print(f"copies of hosts in pinned memory: {', '.join(event.pinned_copies)}")
        self._print(f"run folder: {event.folder}")

    def _print_tier(self, event: RunStarted | RunResumed, precision: str = "") -> None:
        if event.tier is not None:
            why = "" if event.tier_refused is None else f"; the configured tier cannot be used: {event.tier_refused}"
            self._print(f"steps: {event.tier}{precision}{why}")
        if event.cublas_workspace is not None:
            self._print(f"cuBLAS workspaces: {event.cublas_workspace}")

    def _print_round(self, event: RoundCompleted) -> None:
        speed = (
            f"{event.images_per_second:,.0f} images/s" if event.samples else f"{event.epochs_per_second:,.0f} epochs/s"
        )
        left = self._view.seconds_left()
        self._print(
            f"round {event.round}/{event.rounds}  {accuracies(event)}  {event.fossils:.1f} fossils per host  "
            f"{count(event.rollbacks, 'rollback')}  {speed}" + ("" if left is None else f"  ETA {duration(left)}")
        )

    def _print_practice(self, event: PracticeRound) -> None:
        """Prints about four lines in total."""
        if event.round == event.rounds or event.round % max(1, event.rounds // 4) == 0:
            self._print(
                f"practice on simulated hosts, round {event.round}/{event.rounds}: return {event.mean_return:+.3f}"
            )

    def _print_update(self, event: PolicyUpdated) -> None:
        self._print(
            f"  learned: KL {event.approx_kl:.3f}  clipped {event.clip_fraction:.0%}  entropy {event.entropy:.2f}  "
            f"explained variance {event.explained_variance:.2f}  {event.env_steps:,} env steps"
        )

    def _print(self, line: str) -> None:
        # Verbatim: a slot or a path in brackets is not markup, and long lines are not wrapped without a terminal.
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
