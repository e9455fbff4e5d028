"""`esper tasks`: what can be trained, grown and chosen."""

from __future__ import annotations

import click


@click.command("tasks")
def command() -> None:
    """List the tasks, blueprints and controllers."""
    from esper.control.names import NAMES
    from esper.data.tasks import TASKS
    from esper.seeds.blueprints import BLUEPRINTS

    click.echo("Tasks")
    for task in TASKS.values():
        click.echo(f"  {task.name:12s} {task.description}")
    click.echo("\nBlueprints for cnn hosts")
    for name in BLUEPRINTS.names("cnn"):
        click.echo(f"  {name:12s} {BLUEPRINTS.get('cnn', name).description}")
    click.echo(f"\nControllers\n  {', '.join(NAMES)}")
