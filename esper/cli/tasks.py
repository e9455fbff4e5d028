"""`esper tasks`: lists tasks, blueprints and controllers."""

from __future__ import annotations

import click


@click.command("tasks")
def command() -> None:
    """List the tasks, blueprints and controllers."""
    from esper.data.tasks import SIMULATED, TASKS
    from esper.data.user_code import FORM
    from esper.rollout.policies import NAMES
    from esper.seeds.blueprints import BLUEPRINTS

    click.echo("Tasks")
    for name, description in {**{name: task.description for name, task in TASKS.items()}, **SIMULATED}.items():
        click.echo(f"  {name:16s} {description}")
    click.echo(f"  {FORM:16s} a user-defined task: a function in your file that returns an esper.data.task.Task")
    for topology in BLUEPRINTS.topologies():
        click.echo(f"\nBlueprints for {topology} hosts")
        for name in BLUEPRINTS.names(topology):
            click.echo(f"  {name:12s} {BLUEPRINTS.get(topology, name).description}")
    click.echo(f"\nControllers\n  {', '.join(NAMES)}")
