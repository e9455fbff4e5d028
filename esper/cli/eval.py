"""`esper eval`: evaluates a trained agent, or a user's own controller, on held-out hosts."""

from __future__ import annotations

import os
import shlex
from functools import partial
from pathlib import Path
from typing import Any

import click

from esper.agents.spec import ALONE, FORMS_OF_AGENTS, ControllerSpec, require_no_pipe
from esper.cli.compare import play_comparison
from esper.cli.launch import RankOptions, rank_options
from esper.cli.options import check_early, check_json_file, output_folder, put
from esper.config import ConfigError
from esper.config.files import read_toml, set_dotted
from esper.config.given import PATH
from esper.data.names import require_task


@click.command("eval")
@click.argument("controller", metavar="RUN")
@click.option(
    "--task",
    help="Task that hosts are trained on; required if the agent learned on a task defined in a file of yours.  "
    "[default: the task it learned on]",
)
@click.option(
    "--width",
    type=click.IntRange(min=1, max=2**16),
    help="Channels of the host's first block, or features of a token.  [default: the task's]",
)
@click.option("--pairs", type=int, help="Number of held-out hosts.  [default: run.evaluation_pairs, 16]")
@click.option("--seed", type=int, help="Seed of the held-out hosts.  [default: the run's]")
@click.option("--device", help="Device that hosts train on: cpu, cuda, cuda:0, auto, ...  [default: the run's]")
@click.option(
    "--set", "assignments", multiple=True, metavar="A.B=C", help="Set a config value of the hosts; can be repeated."
)
@click.option("--out", type=PATH, help="New or empty output folder.  [default: runs/eval-TASK-TIME]")
@click.option("--json", "json_file", type=PATH, help="Also write results.json to this path; a new file.")
@click.option(
    "--save",
    type=PATH,
    metavar="FILE.safetensors",
    help="Save the agent with these results as one new file, for --controller checkpoint:FILE.",
)
@rank_options
def command(
    controller: str,
    task: str | None,
    width: int | None,
    pairs: int | None,
    seed: int | None,
    device: str | None,
    assignments: tuple[str, ...],
    out: Path | None,
    json_file: Path | None,
    save: Path | None,
    processes: str | None,
    max_restarts: int | None,
    rank_timeout: float,
) -> None:
    """Evaluate a trained agent on held-out hosts, beside the same hosts left alone.

    RUN is a run folder, its checkpoint.pt, a policy in a .safetensors file, or "pretrained", an agent that comes with
    Esper. It plays twice: greedy (its most likely actions) and stochastic (actions from its policy). With --task or
    --width, it plays hosts unlike those it learned on. RUN can also be a controller of your own, path.py:function or
    path.py:Class, which plays once. The folder is that of a comparison: after an interruption, `esper compare --resume`
    continues it.
    """
    ranks = RankOptions.of(processes, max_restarts, rank_timeout)
    ranks.serve_if_other()
    if not ranks.restarted:
        check_json_file(json_file)
    changes: dict[str, Any] = {}
    for assignment in assignments:
        set_dotted(changes, assignment)
    for key, value in {"evaluation_pairs": pairs, "seed": seed, "device": device}.items():
        put(changes, "run", key, value)

    from esper.compare.arms import check_changes

    check_changes(changes)
    if task is not None:
        require_task(task)
    spec = ControllerSpec.of(controller).require_there()
    if not (spec.path or spec.name == "pretrained" or os.path.exists(os.path.expanduser(controller))):
        raise ConfigError(f"no checkpoint at {controller}; {FORMS_OF_AGENTS}")

    run = Path(os.path.expanduser(controller))
    require_no_pipe(run, "checkpoint")
    check_hosts(run, task, changes)

    from esper.compare.evaluate import arms_of, evaluate_controller, hosts_config
    from esper.files.policy import SavedPolicy, check_target, find_policy, save_policy

    played = controller if spec.is_code else find_policy(controller)
    if save is not None:  # fail before anything is played
        if not isinstance(played, SavedPolicy):
            raise ConfigError(f"--save saves a trained agent; {controller} is code, and is saved as it is")
        check_target(save)
        played.provenance()
    config = hosts_config(played, task, changes)
    folder = output_folder(out, "eval", config.task.name, restarted=ranks.restarted)
    set_up = partial(evaluate_controller, played, folder, task, width, changes)
    found = play_comparison(set_up, folder, arms_of(played, config), ranks, json_file)
    if found is None or not isinstance(played, SavedPolicy):
        return
    if played.origin:
        click.echo(f"{played.name} {played.origin}.")
    if save is not None:
        save_policy(played, save, found.score())
        # The command names the task, because on another one the agent may know no blueprint.
        again = shlex.join(["esper", "run", "--task", found.task, "--controller", f"checkpoint:{save}"])
        click.echo(f"Saved. To use it: {again}")


def check_hosts(run: Path, task: str | None, changes: dict[str, Any]) -> None:
    """Raises ConfigError for ``changes`` that hosts of ``task`` cannot have, or those of ``run`` if it is None.

    What is not known without loading a checkpoint is checked later.
    """
    from esper.compare.arms import merged
    from esper.config import TrainingConfig

    tables: dict[str, Any] = {"task": {"name": task}}
    if task is None:
        if not (run / "config.toml").is_file():
            return
        tables = read_toml(run / "config.toml")
    config = TrainingConfig.parse(merged(tables, changes, {"run": {"controller": ALONE}}))
    check_early(config, own_code=True)
