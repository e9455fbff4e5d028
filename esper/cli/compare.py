"""`esper compare`: compares arms on the same hosts, pair by pair."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from esper.agents.spec import ControllerSpec
from esper.cli.launch import RankOptions, echo_waiting, is_same, leave_to_launcher, rank_options
from esper.cli.options import (
    build_tables,
    check_early,
    check_json_file,
    check_resume,
    config_options,
    given_names,
    output_folder,
)
from esper.config import ConfigError
from esper.config.given import COUNT, PATH
from esper.errors import is_of_a_path

if TYPE_CHECKING:
    from esper.compare.arms import Arm
    from esper.compare.comparison import ComparisonResult
    from esper.compare.comparison_run import ComparisonRun
    from esper.show.console import ConsoleSink
    from esper.telemetry.event import RoundCompleted

ARM = "An arm, see above; give two or more."
ARMS = {
    "none": "leaves hosts alone",
    "advisor": "widens all layers before training, if that is worth its price",
    "random, heuristic, plateau, need, schedule": "built-in rules",
    "schedule:FILE.toml": "plays the actions of a file",
    "path.py:function": "a controller of yours, also as path.py:Class",
    "ppo": "an agent that the comparison trains",
    "ppo:RUN, checkpoint:PATH": "a trained agent",
    "pretrained": "the agent that comes with Esper",
    "static": "trains what another arm has grown, from the start",
    "bigger": "trains a wider host with as many parameters",
    "same-compute": "trains the first host for as long as growing took",
    "CONTROLLER:SECTION.KEY=VALUE,...": "has values of its own, such as ppo:reward.mode=sparse",
    "NAME:controller=...,SECTION.KEY=VALUE,...": "the same, with a name",
    "NAME=FILE.toml": "has a name and its own config",
}
"""Forms of arms and what each does, for the help."""


class CompareCommand(click.Command):
    """A command whose help describes the arms."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Arms"):
            formatter.write_dl(list(ARMS.items()), col_max=24)
        super().format_options(ctx, formatter)


@click.command("compare", cls=CompareCommand)
@config_options
@click.option("--arm", "arms", multiple=True, metavar="ARM", help=ARM)
@click.option("--pairs", type=COUNT, help="Number of hosts per arm and training seed.  [default: 10]")
@click.option(
    "--train-seeds",
    type=COUNT,
    metavar="N",
    help="Arms that learn: how often each is trained, with seeds from --seed on.  [default: 5]",
)
@click.option(
    "--rounds",
    type=COUNT,
    help="Arms that learn: number of rounds that each learns from.  [default: the task's]",
)
@click.option(
    "--reference", metavar="NAME", help="Arm that the others are compared with.  [default: none or the last arm]"
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
@rank_options
def command(
    arms: tuple[str, ...],
    pairs: int | None,
    train_seeds: int | None,
    rounds: int | None,
    reference: str | None,
    control_of: str | None,
    out: Path | None,
    json_file: Path | None,
    resume: Path | None,
    config_file: Path | None,
    assignments: tuple[str, ...],
    processes: str | None,
    max_restarts: int | None,
    rank_timeout: float,
    **flags: Any,
) -> None:
    """Compare arms on the same hosts: same initial weights, same batches, test accuracy of the committed networks.

    The other options set config values shared by all arms. With fewer than 10 pairs, every verdict is "inconclusive";
    if an arm learns, with fewer than 5 training seeds. The folder receives every pair's values, the tables and the
    plots.
    """
    ranks = RankOptions.of(processes, max_restarts, rank_timeout)
    ranks.serve_if_other()
    if not ranks.restarted:  # an attempt that was ended has written what it had
        check_json_file(json_file)

    if resume is not None:
        from esper.show.read import is_comparison

        if not is_comparison(resume):
            raise ConfigError(f"{resume} is not the folder of a comparison: it has no comparison.json")
        from esper.compare.comparison_run import ComparisonRun

        own_arms = [arm for arm in arms if not ControllerSpec.of(arm).is_code]
        given = (*own_arms, pairs, train_seeds, rounds, control_of, config_file, out, *assignments)
        allowed = "--reference, --json and the same user-defined --task and --arm path.py:function"
        check_resume(given, flags, "comparison", allowed)
        resumed = partial(ComparisonRun.resume, resume, task=flags["task"], reference=reference, controllers=arms)
        play_comparison(resumed, resume, (), ranks, json_file)
        return

    from esper.compare.arms import read_arms, reference_of

    for assignment in assignments:
        key = assignment.partition("=")[0].strip()
        if key in ("run.controller", "run.rounds"):  # in --config they are allowed, because a run's config has them
            raise ConfigError(f"{assignment} has no effect on a comparison: use --arm, --pairs and --rounds instead")
    read = read_arms(arms, build_tables(config_file, assignments, flags, {("run", "rounds"): rounds}), control_of)
    learning = [arm for arm in read if arm.learns]
    for option, value in {"--train-seeds": train_seeds, "--rounds": rounds}.items():
        if value and not learning:
            raise ConfigError(f"{option} is for arms that learn, and no arm does; add one, such as --arm ppo")
    pairs = pairs or 10
    for arm in read:
        ControllerSpec.of(arm.controller).require_there()
    reference_of(read, reference)
    own_code = any(arm.spec.is_code for arm in read)
    for arm in read:
        check_early(arm.config, given_names(assignments, flags), own_code, ranks.processes)
    task = read[0].config.task.name
    folder = output_folder(out, "compare", task, restarted=ranks.restarted)
    from esper.compare.comparison_run import ComparisonRun  # loads torch, which wrong arms need not wait for

    new = partial(ComparisonRun, read, pairs, folder, reference, train_seeds=train_seeds)
    play_comparison(new, folder, read, ranks, json_file)


def is_comparison_of(folder: Path, arms: Sequence[Arm]) -> bool:
    """True if ``folder`` has a comparison of these arms."""
    from esper.compare.folder import SETTINGS, ComparisonFolder

    if not (folder / SETTINGS).exists():
        return False
    theirs = ComparisonFolder(folder).settings([arm.controller for arm in arms]).arms
    if [arm.name for arm in arms] != [arm.name for arm in theirs]:
        return False
    return all(is_same(ours.config, other.config) for ours, other in zip(arms, theirs, strict=True))


def play_comparison(
    set_up: Callable[..., ComparisonRun],
    folder: Path,
    arms: Sequence[Arm],
    ranks: RankOptions,
    json_file: Path | None,
) -> ComparisonResult | None:
    """Plays the comparison of ``folder`` and returns its result, or starts the ranks that do and returns None.

    Args:
        set_up: makes it, given the progress to report and the ranks.
        arms: those of a new comparison; none if it is resumed.
    """
    from esper.compare.comparison_run import ComparisonRun
    from esper.show.live import progress_sink

    if ranks.processes is not None:
        _launch(folder, arms, ranks)
        return None
    if arms and ranks.restarted and is_comparison_of(folder, arms):
        controllers = [arm.controller for arm in arms]
        set_up = partial(ComparisonRun.resume, folder, task=arms[0].config.task.name, controllers=controllers)
    sink = progress_sink()
    with faults_as_messages(), ranks.joined() as joined:
        learned = partial(_print_learned, sink)
        comparison = None
        try:
            with closing(sink):
                sink.start()
                comparison = set_up(progress=sink.handle, learned=learned, ranks=joined)
                comparison.run()
        except ConfigError:  # raised before any work was done
            raise
        except (Exception, KeyboardInterrupt) as error:  # the pairs that are complete are reported
            leave_to_launcher(error)
            if comparison is not None:
                report(comparison, json_file)
            raise
        report(comparison, json_file)
    echo_waiting(joined)
    return comparison.result


def _launch(folder: Path, arms: Sequence[Arm], ranks: RankOptions) -> None:
    """Starts the ranks that play the comparison of ``folder``; a failure says how to continue it."""
    from esper.compare.folder import SETTINGS, ComparisonFolder, resume_command

    try:
        if arms:
            ranks.launch(arms[0].config, ("--out", str(folder)), folder)
        else:
            from esper.config import TrainingConfig

            saved = ComparisonFolder(folder).read()["arms"][0]["config"]
            ranks.launch(TrainingConfig.parse(saved), (), None)
    except click.ClickException as error:
        if not (folder / SETTINGS).exists():
            raise
        again = resume_command(folder, arms) if arms else "the same command again"
        raise click.ClickException(f"{error.message}\nTo continue: {again}") from None


@contextmanager
def faults_as_messages() -> Iterator[None]:
    """Ends the command with the message of an error that may happen to any program, such as a full disk."""
    from esper.training.executor import is_expected

    try:
        yield
    except Exception as error:
        if isinstance(error, BrokenPipeError) or is_of_a_path(error) or not is_expected(error):
            raise
        raise click.ClickException(str(error)) from error


def _print_learned(sink: ConsoleSink, arm: str, seed: int, event: RoundCompleted) -> None:
    """Prints a line for a round that an arm has learned from."""
    text = f"training seed {seed}, round {event.round}/{event.rounds}: {arm}, mean return {event.mean_return:.3f}"
    sink.print(text)


def report(comparison: ComparisonRun, json_file: Path | None) -> None:
    """Prints and saves the results; if no pair is complete, prints how to resume."""
    from esper.compare.folder import RESULTS, resume_command
    from esper.compare.table import write_report
    from esper.show.console import TerminalConsole

    folder = comparison.files.path
    if comparison.result is None:
        unit = "pair" if comparison.train_seeds is None else "training seed"
        again = resume_command(folder, comparison.arms)
        click.echo(f"No {unit} is complete in every arm yet. To continue: {again}")
        return
    click.echo()
    write_report(comparison.result, TerminalConsole())
    if json_file is not None:
        shutil.copyfile(folder / RESULTS, json_file)
