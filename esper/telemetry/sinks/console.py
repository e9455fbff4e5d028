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


class TerminalConsole(Console):
    """A console that raises BrokenPipeError if its reader goes away (`esper run | head`), instead of exiting."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError("the reader of the output has closed it")


class ConsoleSink:
    """Prints a header, the baseline, and a line per round, rollback, cut seed and warning; ASCII only.

    The time left is the mean duration of the rounds seen so far, times the number of remaining rounds.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rounds_seen = 0
        self._seconds_seen = 0.0

    def handle(self, event: Event) -> None:
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
            case MicroBatchHalved():
                self._print(
                    f"out of memory: env {event.env}, epoch {event.epoch}, batch {event.batch} ({event.reason}); from "
                    f"this epoch on, each batch is split into {event.micro_batches} micro-batches"
                )
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
            case GovernorRollback():
                self._print(
                    f"rollback: env {event.env}, episode {event.episode}, epoch {event.epoch}: {event.reason} "
                    f"({event.value:.4g}, limit {event.threshold:.4g}), back to epoch {event.restored_epoch}"
                )
            case SeedCut():
                self._print(
                    f"seed cut: env {event.env}, episode {event.episode}, epoch {event.epoch}: "
                    f"{event.blueprint} in {event.slot} became non-finite"
                )

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
        self._rounds_seen += 1
        self._seconds_seen += event.seconds
        left = (event.rounds - event.round) * self._seconds_seen / self._rounds_seen
        rate = (
            f"{event.images_per_second:,.0f} images/s" if event.samples else f"{event.epochs_per_second:,.0f} epochs/s"
        )
        self._print(
            f"round {event.round}/{event.rounds}  {accuracies(event)}  "
            f"{event.fossils:.1f} fossils per host  {count(event.rollbacks, 'rollback')}  {rate}  ETA {duration(left)}"
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


def accuracies(event: RoundCompleted) -> str:
    """Formats the accuracy of grown hosts beside hosts left alone.

    They are test accuracies if measured, otherwise (in rounds that an agent learns from) validation accuracies, beside
    the baseline's curve.
    """
    if event.test_accuracy is None or event.alone_test_accuracy is None:
        grown, other, name = event.committed_accuracy, event.baseline_accuracy, "baseline"
    else:
        grown, other, name = event.test_accuracy, event.alone_test_accuracy, "alone"
    return f"grown {grown:.1f} %  {name} {other:.1f} %  ({grown - other:+.1f} pp)"


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def duration(seconds: float) -> str:
    """Formats whole seconds as ``45s``, ``2m05s`` or ``1h02m``."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{rest}s"
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    return f"{minutes // 60}h{minutes % 60:02d}m"
