"""`esper eval`: evaluates a trained agent, or a user's own controller, on held-out hosts."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from esper.cli.launch import RankOptions, echo_waiting, leave_to_launcher, rank_options
from esper.cli.options import PATH, check_json_file, put
from esper.config import ConfigError, set_dotted
from esper.control.spec import ControllerSpec

if TYPE_CHECKING:
    from esper.evaluation.evaluate import PolicyEvaluation
    from esper.files.policy import SavedPolicy


NO_EXPERIENCE = (
    "The agent has no experience with such hosts, so it does not know that any seed pays; with --explore 3, it gathers "
    "some first."
)


@click.command("eval")
@click.argument("controller", metavar="RUN")
@click.option(
    "--task",
    help="Task that hosts are trained on; required if the agent learned on a task defined in a file of yours.  "
    "[default: the task it learned on]",
)
@click.option(
    "--width", type=int, help="Channels of the host's first block, or features of a token.  [default: the task's]"
)
@click.option(
    "--explore",
    type=click.IntRange(min=0),
    default=0,
    metavar="ROUNDS",
    help="Rounds that the agent plays first, on other hosts, to learn what seeds are worth there.",
)
@click.option("--pairs", type=int, help="Number of held-out hosts.  [default: run.evaluation_pairs, 16]")
@click.option("--seed", type=int, help="Seed of the held-out hosts.  [default: the run's]")
@click.option("--device", help="Device that hosts train on: cpu, cuda, cuda:0, auto, ...  [default: the run's]")
@click.option(
    "--set", "assignments", multiple=True, metavar="A.B=C", help="Set a config value of the hosts; can be repeated."
)
@click.option("--json", "json_file", type=PATH, help="Also write all results to this path; a new file.")
@click.option(
    "--save",
    type=PATH,
    metavar="FILE.safetensors",
    help="Save the agent with these results as one new file, for --controller checkpoint:FILE.",
)
@click.option(
    "--without-experience", is_flag=True, help="With --save: leave out what its run has learned of the worths of seeds."
)
@rank_options
def command(
    controller: str,
    task: str | None,
    width: int | None,
    explore: int,
    pairs: int | None,
    seed: int | None,
    device: str | None,
    assignments: tuple[str, ...],
    json_file: Path | None,
    save: Path | None,
    without_experience: bool,
    processes: str | None,
    max_restarts: int | None,
    rank_timeout: float,
) -> None:
    """Evaluate a trained agent on held-out hosts, beside the same hosts left alone.

    RUN is a run folder, its checkpoint.pt, a policy in a .safetensors file, or "pretrained", an agent that comes with
    Esper. It plays twice: greedy (its most likely actions) and stochastic (actions from its policy). With --task or
    --width, it plays hosts unlike those it learned on; with --explore, it first gathers experience there, and the
    bandit "plans" is evaluated with the same experience. RUN can also be a controller of your own, path.py:function,
    which plays once.
    """
    ranks = RankOptions.of(processes, max_restarts, rank_timeout)
    ranks.serve_if_other()
    check_json_file(json_file)
    changes: dict[str, Any] = {}
    for assignment in assignments:
        set_dotted(changes, assignment)
    for key, value in {"evaluation_pairs": pairs, "seed": seed, "device": device}.items():
        put(changes, "run", key, value)

    from esper.evaluation.evaluate import evaluate_controller, hosts_config
    from esper.files.policy import check_target, find_policy
    from esper.training.execution.faults import is_expected

    policy = None if ControllerSpec.of(controller).is_code else find_policy(controller)
    if without_experience and save is None:
        raise ConfigError("--without-experience is for the file of --save; give that, too")
    if save is not None:  # fail before anything is played
        if policy is None:
            raise ConfigError(f"--save saves a trained agent; {controller} is code, and is saved as it is")
        check_target(save)
        policy.provenance()
    if ranks.processes is not None:
        ranks.launch(hosts_config(policy, task, changes))
        return
    evaluate = partial(evaluate_controller, policy or controller, task, width, changes, explore=explore)
    try:
        _evaluate(evaluate, ranks, policy, json_file, save, not without_experience)
    except Exception as error:
        leave_to_launcher(error)
        if is_expected(error):
            raise click.ClickException(str(error)) from error
        raise


def _evaluate(
    evaluate: Callable[..., PolicyEvaluation],
    ranks: RankOptions,
    policy: SavedPolicy | None,
    json_file: Path | None,
    save: Path | None,
    experience: bool,
) -> None:
    """Evaluates, prints the result, and saves it as far as that was asked for."""
    from esper.files.atomic import write_json
    from esper.files.policy import save_policy
    from esper.show.live import progress_sink

    start, sink = time.perf_counter(), progress_sink()
    with ranks.joined() as joined, closing(sink):
        sink.start()
        found = evaluate(progress=sink.handle, work=sink.work, ranks=joined)
    # Printed before anything is written: a full disk should not lose an hour of results.
    click.echo(words(found))
    click.echo(f"{found.pairs * len(found.arms)} hosts in {time.perf_counter() - start:.0f} s")
    echo_waiting(joined)
    if json_file is not None:
        write_json(json_file, found.plain())
    if save is not None and policy is not None:
        save_policy(policy, save, found.score(), experience)
        # The command names the task, because on another one the agent may know no blueprint.
        again = shlex.join(["esper", "run", "--task", found.config.task.name, "--controller", f"checkpoint:{save}"])
        click.echo(f"Saved. To use it: {again}")


def words(found: PolicyEvaluation) -> str:
    """Formats the result for display: hosts left alone, then a line for each way of playing."""
    alone, *ours = found.arms
    score = found.unit
    hosts = "1 held-out host" if found.pairs == 1 else f"{found.pairs} held-out hosts"
    width = "" if found.width is None else f", width {found.width}"
    origin = f" ({found.origin})" if found.origin else ""
    sizes = "; ".join(
        f"{arm.controller} {arm.parameters.mean():,.0f} ({arm.fossils.mean():.1f} seeds kept per host)" for arm in ours
    )
    lines = [
        "",
        f"{found.controller}{origin}",
        f"Test {score.name} of {hosts} ({found.config.task.name}{width}, seed {found.config.run.seed}), "
        "and the paired difference to the same hosts left alone, with its 95 % interval:",
        "",
        f"  {'none':10s} {score.value(float(alone.accuracy.mean())):>8s}",
        *(f"  {c.pair.name_a:10s} {score.value(c.pair.mean_a):>8s}   {c.line(score)}" for c in found.comparisons),
        "",
        f"Parameters: {alone.parameters.mean():,.0f} alone; {sizes}.",
        *([] if found.informed else [NO_EXPERIENCE]),
        *(["The agent was trained once: the intervals leave out the spread of training."] if len(ours) > 1 else []),
    ]
    return "\n".join(lines)
