"""`esper info`: what is installed and built; the observation's layout; the configuration with its manual."""

from __future__ import annotations

import click

from esper.cli.output import echo_folded


@click.command("info")
@click.option("--observation", is_flag=True, help="Print all entries of the observation for a task's host.")
@click.option("--config", "config", is_flag=True, help="Print all config values with their defaults and meanings.")
@click.option("--task", default="digits", show_default=True, help="The task whose host --observation describes.")
def command(observation: bool, config: bool, task: str) -> None:
    """Show versions, hardware and compiled modules; or the observation or the configuration."""
    if observation:
        from esper.data.tasks import load_task
        from esper.seeds.blueprints import BLUEPRINTS
        from esper.spaces.observation import ObservationLayout

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
