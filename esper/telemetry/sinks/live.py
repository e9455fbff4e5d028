"""A live view of the run in a terminal: progress, hosts, policy, and where the time goes."""

from __future__ import annotations

import time
from collections import Counter

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from esper.telemetry.event import (
    EpisodeCompleted,
    EpochCompleted,
    Event,
    PolicyUpdated,
    PracticeRound,
    RoundCompleted,
    RunCompleted,
    RunResumed,
    RunStarted,
)
from esper.telemetry.sinks.console import ConsoleSink, accuracies, duration

REFRESH_SECONDS = 0.25
STAGES = ("GERMINATED", "TRAINING", "BLENDING", "HOLDING", "FOSSILIZED")


class LiveSink:
    """Redraws the view in place a few times per second.

    Lasting information (the header, rollbacks, cut seeds, the comparison) is printed above it by :class:`ConsoleSink`.
    """

    def __init__(self, console: Console) -> None:
        self._lines = ConsoleSink(console)
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._start = time.perf_counter()
        self._drawn = 0.0
        self._rounds = self._epochs_a_round = 1
        self._done = 0
        self._first = 0
        """Number of rounds completed before this process started."""
        self._epochs: dict[int, EpochCompleted] = {}
        """Latest epoch of each env in this round."""
        self._round: RoundCompleted | None = None
        self._policy: PolicyUpdated | None = None
        self._practice: PracticeRound | None = None

    def handle(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._lines.handle(event)
                self._begin(event)
            case RunResumed():
                self._lines.handle(event)
                self._done = self._first = event.round
                self._begin(event)
            case EpochCompleted():
                self._epochs[event.env] = event
            case PracticeRound():
                self._practice = event
                if event.round == event.rounds:  # restart the clock: the time left is estimated from real rounds
                    self._lines.handle(event)
                    self._practice, self._start = None, time.perf_counter()
            case PolicyUpdated():
                self._policy = event
            case RoundCompleted():
                self._round, self._done = event, event.round
                self._epochs.clear()
                if event.round == event.rounds:
                    self._lines.handle(event)
            case EpisodeCompleted():
                return
            case _:
                self._lines.handle(event)
        self._draw(last=isinstance(event, RoundCompleted | RunCompleted))

    def close(self) -> None:
        """Removes the view; prints the last round as a line, unless it was the run's final one."""
        self._live.stop()
        if self._round is not None and self._round.round < self._round.rounds:
            self._lines.handle(self._round)

    def _begin(self, event: RunStarted | RunResumed) -> None:
        self._rounds, self._epochs_a_round = event.rounds, event.n_envs * event.episode_length
        self._live.start()

    def _draw(self, last: bool) -> None:
        now = time.perf_counter()
        if not self._live.is_started or (now - self._drawn < REFRESH_SECONDS and not last):
            return
        self._drawn = now
        self._live.update(self.picture(now - self._start), refresh=True)

    def picture(self, elapsed: float) -> RenderableType:
        """Returns the view after ``elapsed`` seconds in this process."""
        if self._practice is not None:
            p = self._practice
            return Text(f"practice on simulated hosts, round {p.round}/{p.rounds}: return {p.mean_return:+.3f}")
        parts: list[RenderableType] = [self._progress(elapsed)]
        if self._round is not None:
            parts.append(Text(f"last round   {accuracies(self._round)}  return {self._round.mean_return:+.3f}"))
            rates = f"{self._round.epochs_per_second:,.1f} env-epochs/s"
            if self._round.samples:
                rates = f"{self._round.images_per_second:,.0f} images/s, " + rates
            parts.append(Text(f"             {self._round.fossils:.1f} fossils per host, {rates}"))
        if self._epochs:
            parts.append(self._now())
        if self._policy is not None:
            parts.append(self._policy_table(self._policy))
        if self._round is not None:
            parts.append(Text(f"time         {_shares(self._round.phase_seconds)}"))
        return Group(*parts)

    def _progress(self, elapsed: float) -> Table:
        within = sum(e.epoch for e in self._epochs.values()) / self._epochs_a_round
        done = self._done + min(within, 1.0)
        played = done - self._first
        left = f"{duration((self._rounds - done) * elapsed / played) if played > 0 else '?'} left"
        if done >= self._rounds:
            left = "comparing"
        row = Table.grid(padding=(0, 2))
        row.add_row(
            f"round {min(self._done + 1, self._rounds)}/{self._rounds}",
            ProgressBar(total=max(self._rounds, 1), completed=done, width=32),
            f"{duration(elapsed)} elapsed, {left}",
        )
        return row

    def _now(self) -> Text:
        epochs = list(self._epochs.values())
        here, there = (
            sum(getattr(e, name) for e in epochs) / len(epochs) for name in ("validation_accuracy", "baseline_accuracy")
        )
        stages = Counter(stage for e in epochs for stage in e.stages.values())
        seeds = ", ".join(f"{stages[stage]} {stage.lower()}" for stage in STAGES if stages[stage]) or "none"
        epoch = max(e.epoch for e in epochs)
        return Text(f"this round   epoch {epoch}: {here:.1f} %, baseline {there:.1f} %; seeds: {seeds}")

    def _policy_table(self, update: PolicyUpdated) -> Text:
        heads = ", ".join(f"{head} {value:.2f}" for head, value in update.head_entropies.items())
        stopped = ", stopped early" if update.stopped_early else ""
        return Text(
            f"policy       KL {update.approx_kl:.3f}, clipped {update.clip_fraction:.0%}, explained variance "
            f"{update.explained_variance:.2f}, {update.minibatches} minibatches{stopped}\n"
            f"             gradient {update.gradient_norm:.2f}, learning rate {update.learning_rate:.1e}, "
            f"{update.env_steps:,} env steps\n"
            f"entropy      {heads}"
        )


def _shares(phase_seconds: dict[str, float]) -> str:
    """Formats the phases of a round by their share of it, largest first."""
    total = sum(phase_seconds.values()) or 1.0
    ranked = sorted(phase_seconds.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in ranked if seconds / total >= 0.005)


def progress_sink(console: Console) -> ConsoleSink | LiveSink:
    """Returns a live view if the output is an interactive terminal, otherwise plain lines."""
    return LiveSink(console) if console.is_interactive else ConsoleSink(console)
