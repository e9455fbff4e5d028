"""`esper tasks`: lists tasks, blueprints and controllers."""

from __future__ import annotations

import click

from esper.cli.output import echo_folded


@click.command("tasks")
def command() -> None:
    """List the tasks, blueprints and controllers."""
    from esper.agents.spec import FORM, NAMES
    from esper.data.tasks import SIMULATED, TASKS
    from esper.seeds.blueprints import BLUEPRINTS

    click.echo("Tasks")
    for name, description in {**{name: task.description for name, task in TASKS.items()}, **SIMULATED}.items():
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
