"""Lists: versions and configuration (`esper info`), tasks (`esper tasks`), places to grow (`esper sites`)."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Callable
from typing import Any

import click

from esper.config import ConfigError
from esper.data.names import require_data
from esper.telemetry.text import on_terminal

FORMS = "return (model, example), where example are a few inputs of the model; or a task"


def echo_folded(line: str, indent: int) -> None:
    """Prints a line; in a terminal, it is folded between words and goes on ``indent`` columns to the right."""
    if on_terminal():
        line = textwrap.fill(
            line,
            shutil.get_terminal_size().columns,
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
    click.echo(line)


@click.command("info")
@click.option("--observation", is_flag=True, help="Print all entries of the observation for a task's host.")
@click.option("--config", "config", is_flag=True, help="Print all config values with their defaults and meanings.")
@click.option("--task", help="The task whose host --observation describes.  [default: digits]")
def command(observation: bool, config: bool, task: str | None) -> None:
    """Show versions, hardware and compiled modules; or the observation or the configuration."""
    if task is not None and not observation:
        raise ConfigError("--task is for --observation; give that, too")
    if observation:
        if task is None:
            task = "digits"
        require_data(task)
        from esper.core.blueprints import BLUEPRINTS
        from esper.core.observation import ObservationLayout
        from esper.data.tasks import load_task

        loaded = load_task(task)
        host = loaded.new_host(loaded.slots)
        layout = ObservationLayout(host.slot_names, BLUEPRINTS.names(host.topology, host.sites), loaded.episode_length)
        for place, entry in enumerate(layout.entries):
            echo_folded(f"{place:4d}  {entry.kind.value:10s}  {entry.name:32s}  {entry.meaning}", 6)
    elif config:
        from esper.config import TrainingConfig, describe_fields

        for name, default, meaning in describe_fields(TrainingConfig):
            click.echo(f"{name} = {default}")
            echo_folded(f"    {meaning}", 4)
    else:
        from esper.files.system_info import summary_lines
        from esper.ops import _native

        for line in summary_lines():
            echo_folded(line, 17)
        click.echo(f"To rebuild the modules, run in the root of the repository: {_native.REPAIR_COMMAND}")


@click.command("tasks")
def tasks() -> None:
    """List the tasks, blueprints and controllers."""
    from esper.agents.spec import FORM, NAMES
    from esper.core.blueprints import BLUEPRINTS
    from esper.data.names import ENV_ONLY
    from esper.data.tasks import TASKS

    click.echo("Tasks")
    descriptions = {name: task.description for name, task in TASKS.items()}
    for name, description in {**descriptions, **ENV_ONLY}.items():
        echo_folded(f"  {name:16s} {description}", 19)
    echo_folded(f"  {FORM:16s} a user-defined task: a function in your file that returns an esper.data.task.Task", 19)
    for topology in BLUEPRINTS.topologies():
        click.echo(f"\nBlueprints for {topology} hosts")
        for name in BLUEPRINTS.names(topology):
            echo_folded(f"  {name:12s} {BLUEPRINTS.get(topology, name).description}", 15)
    click.echo("\nBlueprints for slots that read a source of their own, in hosts of any kind")
    for name in BLUEPRINTS.possible("cnn", [True]):
        echo_folded(f"  {name:14s} {BLUEPRINTS.get('cnn', name).description}", 17)
    click.echo("\nControllers")
    echo_folded(f"  {', '.join(NAMES)}", 2)


@click.command("sites")
@click.argument("name", metavar="FILE.py:FUNCTION")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: a list with an object for each site.")
def sites(name: str, as_json: bool) -> None:
    """List where seeds can grow in a model of your own.

    FUNCTION, without arguments, returns (model, example), where example are a few inputs: a tensor, a tuple of
    arguments, or a dict of them by name. It may also return a task. Each site is a text for sites= of esper.graft,
    esper.Grower and others. The file is executed.
    """
    from esper.data.user_code import run_user_code

    model, example = run_user_code("model", name, _made)
    from esper.hosts.find import find_sites, table_of  # loads torch, which a wrong name need not wait for

    found = find_sites(model, example)
    if as_json:
        click.echo(json.dumps([site.plain() for site in found], indent=1))
        return
    if not found:
        click.echo("No place was found where a seed could grow.")
        return
    for line in table_of(found):
        click.echo(line)
    click.echo('\nsites="auto" takes one widening and one other site of each stage, at most eight.')


def _made(function: Callable[..., Any]) -> tuple[Any, Any]:
    """Returns the model and the example that ``function`` makes. Raises ConfigError for anything else."""
    from torch import nn

    from esper.data.task import Task
    from esper.hosts.graft import GraftedHost
    from esper.hosts.inputs import Arguments

    made = function()
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module):
        return made
    if not isinstance(made, Task):
        raise ConfigError(f"it returns {type(made).__name__}; it must {FORMS}")
    model: nn.Module = made.build_host()
    example = made.sample
    if isinstance(model, GraftedHost):
        model = model.model
    if isinstance(example, Arguments):
        example = example.values
    return model, example
