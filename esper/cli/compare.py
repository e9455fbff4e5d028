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
from esper.cli.options import PATH, build_tables, check_json_file, check_resume, config_options, new_folder
from esper.config import ConfigError, TrainingConfig
from esper.errors import is_of_a_path

if TYPE_CHECKING:
    from esper.compare.arms import Arm
    from esper.compare.comparison import ComparisonResult
    from esper.compare.comparison_run import ComparisonRun
    from esper.compare.folder import Part
    from esper.config.resolved import HostTrainingConfig
    from esper.show.console import ConsoleSink
    from esper.telemetry.event import RoundCompleted

ARM = """An arm; give two or more. A controller: no-growth, random, heuristic, plateau, schedule, schedule:FILE.toml, or
one of your own, path.py:function. One that the comparison trains: ppo or plans. A trained one: ppo:RUN_FOLDER,
plans:RUN_FOLDER, checkpoint:PATH, or pretrained, which comes with Esper. A control made for the hosts of another arm:
static, bigger, same-compute, static-compute, bigger-compute, bigger-trained, uniform, net2net, ensemble, distilled,
lora or adalora. An arm with its own config: CONTROLLER:SECTION.KEY=VALUE,..., such as ppo:reward.mode=sparse; the same
with a name, NAME:controller=...,SECTION.KEY=VALUE,...; or NAME=FILE.toml."""


@click.command("compare")
@config_options
@click.option("--arm", "arms", multiple=True, metavar="ARM", help=ARM)
@click.option("--pairs", type=click.IntRange(min=1), help="Number of hosts per arm and training seed.  [default: 10]")
@click.option(
    "--train-seeds",
    type=click.IntRange(min=1),
    metavar="N",
    help="Arms that learn: how often each is trained, with seeds from --seed on.  [default: 5]",
)
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    help="Arms that learn: number of rounds that each learns from.  [default: the task's]",
)
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
@click.option(
    "--part",
    metavar="K/N",
    help="Play every N-th round, from the K-th on; or training seed, if an arm learns. --merge puts the parts, which "
    "may come from different machines, together.",
)
@click.option("--merge", is_flag=True, help="Analyse the comparison whose parts are FOLDERS.")
@click.argument("folders", nargs=-1, type=PATH)
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
    part: str | None,
    merge: bool,
    folders: tuple[Path, ...],
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
    check_json_file(None if ranks.restarted else json_file)  # an attempt that was ended has written what it had
    if folders and not merge:
        raise ConfigError(f"unexpected argument {folders[0]}: folders are given after --merge")

    from esper.compare.arms import read_arms
    from esper.compare.comparison_run import ComparisonRun, count_seeds
    from esper.compare.merge import merge as merge_parts

    if resume is not None or merge:
        other = (resume, ranks.processes) if merge else (out,)
        own = (pairs, train_seeds, rounds, control_of, part, config_file, *other)
        given = (*(arm for arm in arms if not ControllerSpec.of(arm).is_code), *own, *assignments)
        allowed = "--reference, --json and the same user-defined --task and --arm path.py:function"
        merging = (f"--out, {allowed}", "--merge FOLDER...") if merge else (allowed,)
        check_resume(given, flags, "comparison", *merging)
        if resume is None:
            resume = out or new_folder("compare", "merged")
            merge_parts(folders, resume, arms)
        resumed = partial(ComparisonRun.resume, resume, task=flags["task"], reference=reference, controllers=arms)
        play_comparison(resumed, resume, (), ranks, json_file)
        return
    ignored = [a for a in assignments if a.partition("=")[0].strip() in ("run.controller", "run.rounds")]
    if ignored:  # in --config they are allowed, because a run's config has them
        raise ConfigError(f"{ignored[0]} has no effect on a comparison: use --arm, --pairs and --rounds instead")
    read = read_arms(arms, build_tables(config_file, assignments, flags, {("run", "rounds"): rounds}), control_of)
    if not any(arm.learns for arm in read) and (train_seeds or rounds):
        option = "--train-seeds" if train_seeds else "--rounds"
        raise ConfigError(f"{option} is for arms that learn, and no arm does; add one, such as --arm ppo")
    folder = out or new_folder("compare", read[0].config.task.name if read else "")
    if len(read) > 1:
        seeds = count_seeds(read, train_seeds) or 1
        learning = [arm for arm in read if arm.learns]

        def episodes(config: HostTrainingConfig) -> int:
            learned = len(learning) * config.run.rounds * config.env.n_envs
            return seeds * (learned + len(read) * (pairs or 10))

        ranks = ranks.chosen("compare", (learning or read)[0].config, episodes)
    played = _part(part, json_file)
    new = partial(ComparisonRun, read, pairs or 10, folder, reference, train_seeds=train_seeds, part=played)
    play_comparison(new, folder, read, ranks, json_file)


def _part(text: str | None, json_file: Path | None) -> Part:
    """Returns the part of the comparison that is named."""
    from esper.compare.folder import WHOLE, Part

    if text is not None and json_file is not None:
        raise ConfigError("--json is for whole comparisons: give it to --merge, not to --part")
    return WHOLE if text is None else Part.parse(text)


def is_comparison_of(folder: Path, arms: Sequence[Arm]) -> bool:
    """True if ``folder`` has a comparison of these arms."""
    from esper.compare.folder import SETTINGS, ComparisonFolder

    if not (folder / SETTINGS).exists():
        return False
    theirs = ComparisonFolder(folder).settings([arm.controller for arm in arms]).arms
    return [arm.name for arm in arms] == [arm.name for arm in theirs] and all(
        is_same(ours.config, other.config) for ours, other in zip(arms, theirs, strict=True)
    )


def play_comparison(
    set_up: Callable[..., ComparisonRun], folder: Path, arms: Sequence[Arm], ranks: RankOptions, json_file: Path | None
) -> ComparisonResult | None:
    """Plays the comparison of ``folder`` and returns its result, or starts the ranks that do and returns None.

    Args:
        set_up: makes it, given the progress to report and the ranks.
        arms: those of a new comparison; none if it is resumed.
    """
    from esper.compare.comparison_run import ComparisonRun
    from esper.compare.folder import SETTINGS, ComparisonFolder, resume_command
    from esper.show.live import progress_sink

    if ranks.processes is not None:
        config = arms[0].config if arms else TrainingConfig.parse(ComparisonFolder(folder).read()["arms"][0]["config"])
        try:
            ranks.launch(config, ("--out", str(folder)) if arms else (), folder if arms else None)
        except click.ClickException as error:
            again = resume_command(folder, arms) if arms else "the same command again"
            words = f"\nTo continue: {again}" if (folder / SETTINGS).exists() else ""
            raise click.ClickException(f"{error.message}{words}") from None
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
    """Prints and saves the results; if no pair is complete, prints how to resume, and of a part how to go on."""
    from esper.compare.folder import RESULTS, WHOLE, resume_command
    from esper.compare.table import write_report
    from esper.show.console import TerminalConsole

    folder, again = comparison.files.path, resume_command(comparison.files.path, comparison.arms)
    if comparison.part != WHOLE:
        done = "is finished. Once all parts are: esper compare --merge FOLDER..."
        click.echo(f"{folder}, {comparison.part}, {done if comparison.finished else f'is not finished: {again}'}")
        return
    if comparison.result is None:
        unit = "pair" if comparison.train_seeds is None else "training seed"
        click.echo(f"No {unit} is complete in every arm yet. To continue: {again}")
        return
    click.echo()
    write_report(comparison.result, TerminalConsole())
    if json_file is not None:
        shutil.copyfile(folder / RESULTS, json_file)
