"""`esper run`: grow hosts with a controller, and say what it achieved beside the same hosts left alone."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from esper.cli.options import build_config, config_options

if TYPE_CHECKING:
    from esper.experiment.run import RunSummary


@click.command("run")
@config_options
@click.option("--controller", help="schedule, schedule:FILE.toml, heuristic, random or none.  [default: schedule]")
@click.option("--rounds", type=click.INT, help="Rounds of one episode in every env.")
@click.option(
    "--out", type=click.Path(path_type=Path), help="Run folder, new or empty.  [default: runs/TASK-CONTROLLER-TIME]"
)
def command(
    controller: str | None,
    rounds: int | None,
    out: Path | None,
    config_file: Path | None,
    assignments: tuple[str, ...],
    **flags: Any,
) -> None:
    """Grow hosts with a controller, beside the same hosts left alone.

    What is not given comes from the task. The run folder gets config.toml, env.json, baseline.json, events.jsonl,
    metrics.csv and the best grown host.
    """
    config = build_config(
        config_file, assignments, flags, {("run", "controller"): controller, ("run", "rounds"): rounds}
    )

    from rich.console import Console

    from esper.experiment.run import Experiment
    from esper.telemetry.sinks.console import ConsoleSink

    folder = out or default_folder(config.task.name, config.run.controller)
    with Experiment(config, folder, [ConsoleSink(Console())]) as experiment:
        try:
            summary = experiment.run()
        except KeyboardInterrupt:
            click.echo(f"No round was completed; the events until then are in {folder}.")
            raise
    click.echo(closing_words(summary, config.run.controller, config.task.name))
    if summary.interrupted:
        raise click.Abort


def default_folder(task: str, controller: str) -> Path:
    """``runs/TASK-CONTROLLER-TIME``, with a schedule file's stem in place of its path."""
    kind, _, file = controller.partition(":")
    name = f"{task}-{Path(file).stem if file else kind}-{time.strftime('%Y%m%d-%H%M%S')}"
    return Path("runs") / name


def closing_words(summary: RunSummary, controller: str, task: str) -> str:
    """What a person reads last: the result beside the hosts left alone, what it cost, where it is, what to try next."""
    from esper.telemetry.sinks.console import count

    c = summary.comparison
    low, high = c.interval
    others = [
        f"  esper run --task {task} --controller {name}" for name in ("schedule", "heuristic") if name != controller
    ]
    lines = [
        "",
        f"Test accuracy of {c.pairs} grown hosts: {c.mean_a:.2f} %; the same hosts left alone: {c.mean_b:.2f} %.",
        f"Paired difference {c.difference:+.2f} pp, 95 % interval {low:+.2f} to {high:+.2f} (p = {c.p_value:.2g}): "
        f"{c.verdict() if c.winner() is None else f'{c.winner()} is better'}.",
        f"Parameters: {summary.host_parameters:,} alone, {summary.grown_parameters:,.0f} grown "
        f"({summary.fossils:.1f} seeds kept a host).",
        f"{count(summary.rounds, 'round')} in {summary.seconds:.0f} s; run folder: {summary.folder}",
        *(f"Telemetry lost: {name} failed ({error})." for name, error in summary.dropped_sinks.items()),
        *(["Interrupted: the figures are those of the rounds that were completed."] if summary.interrupted else []),
        "",
        "Next:",
        *others[:1],
        f"  esper compare --task {task} --arm schedule --arm heuristic --arm none --pairs 20",
        "  esper info --observation",
    ]
    return "\n".join(lines)
