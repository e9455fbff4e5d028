"""`esper compare`: compares arms on the same hosts, pair by pair."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from esper.cli.options import PATH, build_tables, check_json_file, check_resume, config_options, new_folder
from esper.cli.run import is_expected
from esper.config import ConfigError
from esper.data.user_code import is_user_code

if TYPE_CHECKING:
    from esper.evaluation.comparison import ComparisonRun

ARM = """An arm; give two or more. A controller: no-growth, random, heuristic, schedule, schedule:FILE.toml, or one of
your own, path.py:function. A trained agent: ppo:RUN_FOLDER, checkpoint:PATH, or pretrained, which is shipped with
Esper. A control made for the hosts of another arm: static, bigger or same-compute. An arm with its own config:
NAME=FILE.toml or NAME:controller=...,SECTION.KEY=VALUE,..."""


@click.command("compare")
@config_options
@click.option("--arm", "arms", multiple=True, metavar="ARM", help=ARM)
@click.option("--pairs", type=click.IntRange(min=1), help="Number of hosts per arm.  [default: 10]")
@click.option(
    "--reference", metavar="NAME", help="Arm that the others are compared with.  [default: no-growth or the last arm]"
)
@click.option(
    "--of", "control_of", metavar="NAME", help="Arm that controls are made for.  [default: the first that grows hosts]"
)
@click.option("--out", type=PATH, help="New or empty output folder.  [default: runs/compare-TASK-TIME]")
@click.option("--json", "json_file", type=PATH, help="Also write results.json to this path; a new file.")
@click.option(
    "--resume",
    type=PATH,
    metavar="FOLDER",
    help="Continue a comparison, or analyse it again with another --reference. Code in files of yours has to be named "
    "again: a task with --task, controllers with --arm path.py:function.",
)
def command(
    arms: tuple[str, ...],
    pairs: int | None,
    reference: str | None,
    control_of: str | None,
    out: Path | None,
    json_file: Path | None,
    resume: Path | None,
    config_file: Path | None,
    assignments: tuple[str, ...],
    **flags: Any,
) -> None:
    """Compare arms on the same hosts: same initial weights, same batches, test accuracy of the committed networks.

    The other options set config values shared by all arms. With fewer than 10 pairs, every verdict is "inconclusive".
    The folder receives every pair's values, the tables and the plots.
    """
    check_json_file(json_file)
    if resume is not None:
        given = (*(arm for arm in arms if not is_user_code(arm)), pairs, control_of, out, config_file, *assignments)
        allowed = "--reference, --json and the same user-defined --task and --arm path.py:function"
        check_resume(given, flags, "comparison", allowed)
    else:
        tables = build_tables(config_file, assignments, flags, {})
        ignored = [a for a in assignments if a.partition("=")[0].strip() in ("run.controller", "run.rounds")]
        if ignored:  # in --config they are allowed, because a run's config has them
            raise ConfigError(f"{ignored[0]} has no effect on a comparison: use --arm and --pairs instead")

    from esper.evaluation.arms import read_arms
    from esper.evaluation.comparison import ComparisonRun
    from esper.telemetry.sinks.console import ConsoleSink, TerminalConsole

    progress = ConsoleSink(TerminalConsole()).handle
    if resume is not None:
        comparison = ComparisonRun.resume(resume, progress, flags["task"], reference, arms)
    else:
        read = read_arms(arms, tables, control_of)
        task = read[0].config.task.name if read else ""
        comparison = ComparisonRun(read, pairs or 10, out or new_folder("compare", task), reference, progress)
    try:
        comparison.run()
    except ConfigError:  # raised before any work was done
        raise
    except (Exception, KeyboardInterrupt) as error:  # the pairs that are complete are reported
        report(comparison, json_file)
        if isinstance(error, Exception) and is_expected(error):
            raise click.ClickException(str(error)) from error
        raise
    report(comparison, json_file)


def report(comparison: ComparisonRun, json_file: Path | None) -> None:
    """Prints and saves the results; if no pair is complete, prints how to resume."""
    from esper.evaluation.folder import RESULTS, resume_command
    from esper.evaluation.table import write_report
    from esper.telemetry.sinks.console import TerminalConsole

    folder = comparison.files.path
    if comparison.result is None:
        again = resume_command(folder, comparison.arms)
        click.echo(f"No pair is complete in every arm yet. To continue: {again}")
        return
    click.echo()
    write_report(comparison.result, TerminalConsole())
    if json_file is not None:
        shutil.copyfile(folder / RESULTS, json_file)
