"""`esper run`: grow hosts with a controller, and say what it achieved beside the same hosts left alone."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from esper.cli.options import build_config, config_options
from esper.config import ConfigError

if TYPE_CHECKING:
    from esper.experiment.run import RunSummary


@click.command("run")
@config_options
@click.option(
    "--controller",
    help="ppo, checkpoint:PATH, schedule, schedule:FILE.toml, heuristic, random or none.  [default: ppo]",
)
@click.option("--rounds", type=click.INT, help="Rounds of one episode in every env.")
@click.option(
    "--out", type=click.Path(path_type=Path), help="Run folder, new or empty.  [default: runs/TASK-CONTROLLER-TIME]"
)
@click.option(
    "--resume",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Go on with an interrupted run; no other options.",
)
def command(
    controller: str | None,
    rounds: int | None,
    out: Path | None,
    resume: Path | None,
    config_file: Path | None,
    assignments: tuple[str, ...],
    **flags: Any,
) -> None:
    """Grow hosts with a controller, and compare it with hosts left alone and other baselines.

    What is not given comes from the task. The run folder gets config.toml, env.json, baseline.json, events.jsonl,
    metrics.csv, the best grown host and a checkpoint.
    """
    given = [controller, rounds, out, config_file, *assignments, *flags.values()]
    if resume is not None and any(value is not None for value in given):
        raise ConfigError("--resume FOLDER goes on with the run as it was begun; it takes no other option")

    if resume is None:
        config = build_config(
            config_file, assignments, flags, {("run", "controller"): controller, ("run", "rounds"): rounds}
        )

    from esper.experiment.run import Experiment
    from esper.telemetry.sinks.console import TerminalConsole
    from esper.telemetry.sinks.live import progress_sink
    from esper.training.lanes import LaneError

    sinks = [progress_sink(TerminalConsole())]
    if resume is not None:
        experiment = Experiment.resume(resume, sinks)
    else:
        experiment = Experiment(config, out or default_folder(config.task.name, config.run.controller), sinks)
    folder = experiment.folder
    with experiment:
        try:
            summary = experiment.run()
        except KeyboardInterrupt:
            click.echo(how_to_go_on(folder))
            raise
        except (LaneError, OSError) as error:
            raise click.ClickException(f"{error}\n{how_to_go_on(folder)}") from error
        except Exception:
            click.echo(how_to_go_on(folder), err=True)
            raise
    click.echo(closing_words(summary, experiment.config.task.name))
    if summary.interrupted:
        raise click.Abort


def how_to_go_on(folder: Path) -> str:
    """What is left of a run that ended before its time."""
    from esper.experiment import checkpoint

    if (folder / checkpoint.NAME).exists():
        return f"What was done until then is kept: esper run --resume {folder}"
    return f"It had not come to a first checkpoint; the events until then are in {folder}."


def default_folder(task: str, controller: str) -> Path:
    """``runs/TASK-CONTROLLER-TIME``, with a schedule file's stem in place of its path."""
    kind, _, file = controller.partition(":")
    name = f"{task}-{Path(file).stem if file else kind}-{time.strftime('%Y%m%d-%H%M%S')}"
    return Path("runs") / name


def closing_words(summary: RunSummary, task: str) -> str:
    """What a person reads last: the result beside each baseline, what it cost, where it is, what to try next."""
    from esper.telemetry.sinks.console import count

    done = f"{count(summary.rounds, 'round')} in {summary.seconds:.0f} s; run folder: {summary.folder}"
    resume = [f"  esper run --resume {summary.folder}"] if summary.interrupted else []
    return "\n".join(
        [
            "",
            *(result_lines(summary) if summary.comparisons else [without_comparison(summary)]),
            done,
            *(f"Telemetry lost: {name} failed ({error})." for name, error in summary.dropped_sinks.items()),
            *(["Interrupted: what is above is of the rounds that were completed."] if summary.interrupted else []),
            "",
            "Next:",
            *resume,
            *next_commands(summary, task),
        ]
    )


def without_comparison(summary: RunSummary) -> str:
    """Why there are no figures."""
    if summary.rounds == summary.total_rounds:
        return "All rounds are done, the comparison is not: resuming plays it."
    return "Nothing is compared: the agent is still learning."


def result_lines(summary: RunSummary) -> list[str]:
    """A table of the baselines, and in words whether the controller did better than each."""
    ours, first = summary.controller, summary.comparisons[0].pair
    lines = [
        f"Test accuracy of {first.pairs} hosts grown by {ours}: {first.mean_a:.2f} %. "
        f"The same hosts under each baseline, and the paired difference:",
        "",
    ]
    for found in summary.comparisons:
        c = found.pair
        interval = f"95 % interval {c.interval.low:+.2f} to {c.interval.high:+.2f}" if c.pairs > 1 else "no interval"
        lines.append(f"  {c.name_b:10s} {c.mean_b:6.2f} %   {c.difference:+6.2f} pp, {interval}: {found.verdict_word}")
    lines += [
        "",
        f"Parameters: {summary.host_parameters:,} alone, {summary.grown_parameters:,.0f} grown "
        f"({summary.fossils:.1f} seeds kept a host).",
    ]
    return lines


def next_commands(summary: RunSummary, task: str) -> list[str]:
    """What a person may want to type next."""
    from esper.control.script import schedule_ships

    if summary.controller == "ppo" and not summary.interrupted:
        ours = f"checkpoint:{summary.folder}"
    elif summary.controller.startswith(("checkpoint:", "schedule:")):
        ours = summary.controller
    else:
        ours = "schedule" if schedule_ships(task) else "random"
    return [
        f"  esper compare --config {summary.folder}/config.toml --arm {ours} --arm heuristic --arm none --pairs 20",
        *([f"  esper run --task {task} --controller {ours}"] if ours != summary.controller else []),
        "  esper info --observation",
    ]
