"""`esper sites`: the places of a model where seeds can grow."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import click

FORMS = "return (model, example), where example are a few inputs of the model; or a task"


@click.command("sites")
@click.argument("name", metavar="FILE.py:FUNCTION")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: a list with an object for each site.")
def command(name: str, as_json: bool) -> None:
    """List where seeds can grow in a model of your own.

    FUNCTION, without arguments, returns (model, example), where example are a few inputs: a tensor, a tuple of
    arguments, or a dict of them by name. It may also return a task. Each site is a text for sites= of esper.graft,
    esper.Grower and others. The file is executed.
    """
    from esper.data.user_code import run_user_code
    from esper.hosts.find import find_sites, table_of

    model, example = run_user_code("model", name, _made)
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

    from esper.config import ConfigError
    from esper.data.task import Task
    from esper.hosts.graft import GraftedHost
    from esper.hosts.inputs import Arguments

    made = function()
    if isinstance(made, Task):
        host, sample = made.build_host(), made.sample
        example = sample.values if isinstance(sample, Arguments) else sample
        return (host.model if isinstance(host, GraftedHost) else host), example
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module):
        return made
    raise ConfigError(f"it returns {type(made).__name__}; it must {FORMS}")
