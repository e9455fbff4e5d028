"""`esper run`: grows hosts with a controller and compares the result with the same hosts left alone."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from esper.agents.spec import ALONE, SAVED, UNTRAINED, ControllerSpec
from esper.cli.launch import RankOptions, echo_waiting, is_same, leave_to_launcher, rank_options
from esper.cli.options import build_tables, check_early, check_resume, config_options, given_names, output_folder
from esper.config import ConfigError
from esper.config.given import PATH
from esper.data.names import ENV_ONLY, LEARNED_ON
from esper.data.user_code import is_user_task
from esper.telemetry.text import count, trained_once

if TYPE_CHECKING:
    from esper.compare.analysis import ArmComparison
    from esper.config import TrainingConfig
    from esper.run.experiment import Experiment
    from esper.run.telemetry import RunSummary
    from esper.telemetry.score import ScoreUnit
    from esper.training.execution.ranks import RunRanks

WITHOUT_GROWTH = ("bigger", "same-compute")
"""Arms that a run does not compare with."""
RULES_OF = {"planted": ("heuristic", "random"), "varied": ("advisor", "random")}
"""Arms to compare with on tasks that have an env only."""
MAX_READ = 200_000_000
"""Bytes of the largest event log that is read again at the end of a run: a few seconds."""


@click.command("run")
@config_options
@click.option(
    "--controller",
    help="ppo, checkpoint:PATH, pretrained, advisor, schedule, schedule:FILE.toml, heuristic, plateau, need, random, "
    "none, or one of your own, path.py:function or path.py:Class.  [default: ppo]",
)
@click.option("--rounds", type=click.INT, help="Number of rounds; each is one episode in every env.")
@click.option("--out", type=PATH, help="New or empty run folder.  [default: runs/TASK-CONTROLLER-TIME]")
@click.option(
    "--track",
    multiple=True,
    metavar="NAME",
    help="Also show the run in tensorboard; wandb and trackio need a Python program with an active run.",
)
@click.option(
    "--telemetry",
    type=click.Choice(["minimal", "normal", "debug"]),
    help="What is recorded: rounds and results only, also every host, or also each WAIT and phases in profiler traces."
    "  [default: normal]",
)
@click.option(
    "--resume",
    type=PATH,
    metavar="FOLDER",
    help="Continue an interrupted run. Takes no other option, but a task or controller defined in a file of yours has "
    "to be named again with --task or --controller.",
)
@rank_options
def command(
    controller: str | None,
    rounds: int | None,
    out: Path | None,
    track: tuple[str, ...],
    telemetry: str | None,
    resume: Path | None,
    config_file: Path | None,
    assignments: tuple[str, ...],
    processes: str | None,
    max_restarts: int | None,
    rank_timeout: float,
    **flags: Any,
) -> None:
    """Grow hosts with a controller, and compare it with the same hosts left alone, and an agent with rules, too.

    A host is a small network that grows while it trains. Without --task, an agent learns on hosts that differ, the task
    varied; other controllers grow hosts of digits. Defaults not shown below come from the task; `esper info --config`
    lists every value of --set. The run folder receives config.toml, env.json, events.jsonl, metrics.csv, a checkpoint
    and, unless hosts are simulated or drawn (planted, varied), the best grown host.
    """
    ranks = RankOptions.of(processes, max_restarts, rank_timeout)
    ranks.serve_if_other()
    task = flags["task"]
    if resume is not None:
        named_again = controller is not None and ControllerSpec.of(controller).is_code
        given = (None if named_again else controller, rounds, out, telemetry, config_file, *assignments, *track)
        check_resume(given, flags, "run", "the same user-defined --task and --controller")
        if not resume.is_dir():
            raise ConfigError(f"no checkpoint at {resume}; give the folder of a run that has written one")
        folder = resume
    else:
        said = {
            ("run", "controller"): controller,
            ("run", "rounds"): rounds,
            ("track", "to"): track or None,
            ("telemetry", "level"): telemetry,
        }
        tables = build_tables(config_file, assignments, flags, said)
        from esper.config import TrainingConfig

        config = TrainingConfig.parse(tables)
        if config.run.learns and "name" not in config.task.model_fields_set:
            config = config.with_values(task={"name": LEARNED_ON})
        task, controller = config.task.name, config.run.controller
        ControllerSpec.of(controller).require_known()
        set_here = given_names(assignments, flags)
        check_early(config, set_here, processes=ranks.processes)
        if not config.run.learns:
            require_learning(set_here, controller)
        folder = output_folder(out, task, controller, restarted=ranks.restarted)
        if ranks.restarted and is_run_of(folder, config):
            resume, controller = folder, controller if ControllerSpec.of(controller).is_code else None
        elif ranks.restarted:
            ranks.clear(folder)
    if ranks.processes is not None:
        try:
            if resume is not None:
                config = _config_of(folder)
            ranks.launch(config, () if resume else ("--out", str(folder)), None if resume else folder)
        except click.ClickException as error:
            words = how_to_go_on(folder, task or "", controller or "")
            raise click.ClickException(f"{error.message}\n{words}") from None
        return

    from esper.run.experiment import Experiment
    from esper.show.live import progress_sink

    sink = progress_sink()
    with ranks.joined() as joined:
        if resume is not None:
            chosen = Experiment.resume(resume, [sink], task=task, controller=controller, ranks=joined)
        else:
            chosen = Experiment(config, folder, [sink], ranks=joined)
            echo_unlike(chosen)
        with resumable(chosen):
            summary = chosen.run()
        conclude(chosen, summary, joined)


def require_learning(given: Iterable[str], controller: str) -> None:
    """Raises ConfigError for values among those ``given``, as SECTION.KEY, that only an agent that learns reads."""
    for name in sorted(given):
        if name == "run.evaluation_pairs":
            raise ConfigError(
                f"{name} has no effect here: each round of {controller} is compared with the same hosts left alone, "
                "and --rounds and --envs set their number; it is for --controller ppo"
            )
        if name.startswith("ppo."):
            raise ConfigError(f"{name} has no effect here: {controller} does not learn; it is for --controller ppo")


def echo_unlike(experiment: Experiment) -> None:
    """Says in which settings the env of a trained agent differs from the one that it learned in."""
    spec = ControllerSpec.of(experiment.config.run.controller)
    if spec.kind not in SAVED:
        return
    from esper.files.policy import find_policy

    env = experiment.trainer.env
    words = find_policy(spec.path or spec.name).unlike(env.config, env.action_spec)
    if words:
        click.echo(words)


@contextmanager
def resumable(experiment: Experiment) -> Iterator[None]:
    """Closes ``experiment`` after the block, and says how to resume it if the block raises an error."""
    from esper.training.executor import is_expected

    words = partial(how_to_go_on, experiment.folder, experiment.config.task.name, experiment.config.run.controller)
    with experiment:
        try:
            yield
        except KeyboardInterrupt:
            if not experiment.finished:
                click.echo(words())
            raise
        except ConfigError:  # raised before any work was done
            raise
        except Exception as error:
            leave_to_launcher(error)
            if is_expected(error):
                raise click.ClickException(f"{error}\n{words()}") from error
            click.echo(words(), err=True)
            raise


def conclude(experiment: Experiment, summary: RunSummary, ranks: RunRanks | None = None) -> None:
    """Draws the best host of a run, and prints its result. Raises click.Abort if it was interrupted."""
    if not summary.interrupted:
        draw_life(experiment.folder)
    config = experiment.config
    if config.run.learns and config.run.rounds <= config.ppo.validate_every:
        click.echo(
            f"No learning curve: in runs of more than {config.ppo.validate_every} rounds (ppo.validate_every), the "
            "agent plays validation hosts as it learns."
        )
    click.echo(closing_words(summary, config.task.name))
    echo_waiting(ranks)
    if summary.interrupted:
        raise click.Abort


def draw_life(folder: Path) -> None:
    """Draws the life of the best host next to the run; the run is done, so what fails is only reported."""
    from esper.show.life import best_life, save_life
    from esper.show.read import EVENTS, open_run

    try:
        if (folder / EVENTS).stat().st_size > MAX_READ:
            click.echo(f"The log is long: {shlex.join(['esper', 'report', str(folder)])} draws the best host.")
            return
        host = best_life(open_run(folder).view)
        if host is not None:
            save_life(host, folder)
            click.echo(f"{host.title}: {host.words} Its life: {folder / 'life.svg'}")
    except Exception as error:  # such as a missing or broken matplotlib
        click.echo(f"No picture of the best host: {type(error).__name__}: {error}")


def _named_again(task: str) -> list[str]:
    """Returns the option that commands on a run's folder need if its task is user-defined."""
    if not is_user_task(task):
        return []
    return ["--task", task]


def is_run_of(folder: Path, config: TrainingConfig) -> bool:
    """True if ``folder`` has a checkpoint of a run with this config."""
    from esper.files import checkpoint

    return bool(checkpoint.files(folder)) and is_same(config, _config_of(folder))


def _config_of(folder: Path) -> TrainingConfig:
    from esper.config import TrainingConfig, read_toml

    return TrainingConfig.parse(read_toml(folder / "config.toml"))


def how_to_go_on(folder: Path, task: str, controller: str) -> str:
    """Explains how to resume a run that ended early, or that it has no checkpoint yet."""
    from esper.files import checkpoint

    if checkpoint.files(folder):
        return f"Progress was saved. To continue: {resume_command(folder, task, controller)}"
    return f"No checkpoint was written yet, so the run cannot be resumed; its events so far are in {folder}."


def resume_command(folder: Path, task: str, controller: str) -> str:
    """Returns the command that resumes a run."""
    command = ["esper", "run", "--resume", str(folder), *_named_again(task)]
    if ControllerSpec.of(controller).is_code:
        command += ["--controller", controller]
    return shlex.join(command)


def closing_words(summary: RunSummary, task: str) -> str:
    """Formats the final report: the result beside each baseline, the folder, the answer, and what to try next."""
    answer = plain_words(summary, task)
    if summary.comparisons:
        results = result_lines(summary)
    elif summary.rounds == summary.total_rounds and not summary.interrupted:
        results = ["Nothing was compared: run.evaluation_pairs is 0."]
    elif summary.rounds == summary.total_rounds:
        results = ["All rounds are done, but the comparison is not: resume the run to complete it."]
    else:
        results = ["Nothing was compared: the agent is still learning."]
    done = f"{count(summary.rounds, 'round')} in {summary.seconds:.0f} s; run folder: {summary.folder}"
    lines = ["", *results, done]
    for name, error in summary.dropped_sinks.items():
        lines.append(f"Telemetry lost: {name} failed ({error}).")
    if summary.interrupted:
        lines.append("Interrupted: the figures above cover only the completed rounds.")
    commands = next_commands(summary, task)
    if summary.interrupted:
        commands.insert(0, f"  {resume_command(summary.folder, task, summary.controller)}")
    lines += ["", *answer, "Next:", *commands]
    return "\n".join(lines)


def result_lines(summary: RunSummary) -> list[str]:
    """Formats a table of the baselines, and whether the controller did better than each."""
    ours, first, score = summary.controller, summary.comparisons[0].pair, summary.score
    return [
        f"Test {score.name} of {first.pairs} hosts grown by {ours}: {score.value(first.mean_a)}.",
        "The same hosts under each baseline, and the paired difference (95 % interval):",
        "",
        *(f"  {c.pair.name_b:10s} {score.value(c.pair.mean_b):>8s}   {c.line(score)}" for c in summary.comparisons),
        "",
        *trained_once([ours]),
    ]


def plain_words(summary: RunSummary, task: str) -> list[str]:
    """Returns the answer: whether growing paid off, its size, and what was not compared; [] without hosts alone."""
    others = {found.pair.name_b: found for found in summary.comparisons}
    if ALONE not in others:
        return []
    alone = others[ALONE]
    pair, gap = alone.pair, summary.score.difference(alone.pair.difference)
    story = {
        "better": f"growing paid off: {gap} over the same hosts alone, {pair.wins} of {pair.pairs} better",
        "worse": f"growing did harm: {gap} against the same hosts alone",
        "no evidence": f"whether growing pays off is open: {gap} on {pair.pairs} hosts",
        "no verdict": f"{gap}, without a verdict: {pair.constant}",
    }
    answer = [
        f"In short, {story.get(alone.word, f'too few hosts to tell whether growing paid off ({gap})')}.",
        *(learning_words(others[UNTRAINED], summary.score) if UNTRAINED in others else ()),
        f"Parameters: {summary.host_parameters:,} alone, {summary.grown_parameters:,.0f} grown "
        f"({summary.fossils:.1f} seeds kept per host).",
    ]
    if task not in ENV_ONLY:  # whose hosts cannot be larger from the start
        answer.append("Not compared: hosts of that size from the start, or trained for longer.")
    return answer


def learning_words(found: ArmComparison, score: ScoreUnit) -> list[str]:
    """Returns whether learning made an agent better, by its comparison with itself untrained."""
    gap = score.difference(found.pair.difference)
    if found.word in ("better", "worse"):
        return [f"Learning made the agent {found.word}: {gap} against the agent untrained."]
    return [f"Whether learning helped is open: {gap} against the agent untrained."]


def next_commands(summary: RunSummary, task: str) -> list[str]:
    """Suggests commands to run next."""
    spec = ControllerSpec.of(summary.controller)
    # The run has compared the shipped schedule if that fits its slots and blueprints.
    fitting = [spec.name, *(comparison.pair.name_b for comparison in summary.comparisons)]
    if spec.learns and not summary.interrupted:
        ours = spec.following(summary.folder)
    elif not spec.learns and not spec.alone:
        ours = spec.name
    elif "schedule" in fitting:
        ours = "schedule"
    else:
        ours = "random"
    arms = [ours, *WITHOUT_GROWTH, ALONE]
    if task in ENV_ONLY:
        arms = [ours, *(rule for rule in RULES_OF[task] if rule != ours), ALONE]
    elif is_user_task(task):
        arms.remove("bigger")  # only a HostFamily can be wider
    compare = ["esper", "compare", "--config", f"{summary.folder}/config.toml", *_named_again(task)]
    for arm in arms:
        compare += ["--arm", arm]
    commands = [["esper", "report", str(summary.folder)], [*compare, "--pairs", "20"]]
    return [f"  {shlex.join(command)}" for command in commands]
