"""`esper demo`: the whole story in two minutes: the advisor sizes hosts beside the same hosts left alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from esper.cli.options import output_folder
from esper.config.given import PATH

if TYPE_CHECKING:
    from esper.config import TrainingConfig

ROUNDS = 2
"""Rounds of eight hosts: enough pairs for a verdict."""


def configuration(seed: int) -> TrainingConfig:
    """Returns the config of the demo: the defaults, with the advisor on `digits`."""
    from esper.config import TrainingConfig

    run = {
        "controller": "advisor",
        "rounds": ROUNDS,
        "seed": seed,
    }
    return TrainingConfig.parse({"run": run, "task": {"name": "digits"}})


@click.command("demo")
@click.option("--seed", type=click.IntRange(min=0, max=2**31 - 1), default=0, show_default=True, help="Random seed.")
@click.option("--out", type=PATH, help="New or empty run folder.  [default: runs/demo-TIME]")
def command(seed: int, out: Path | None) -> None:
    """See in two minutes what Esper does, on 8x8 images of digits that are installed with it.

    The advisor decides how wide 16 small networks are to be. The same 16 networks, with the same initial weights and
    the same batches, are left alone beside them, and the two are compared on test images.
    """
    folder = output_folder(out, "demo")
    click.echo(
        "The advisor widens 16 small networks before they learn to read digits. The\n"
        "same networks are left alone beside them, with the same initial weights and\n"
        "the same batches of images.\n"
    )
    # Imported only now: torch takes a second or more, and the first words should not.
    from esper.cli.run import conclude, resumable
    from esper.run.experiment import Experiment
    from esper.show.live import progress_sink

    sink = progress_sink()
    experiment = Experiment(configuration(seed), folder, [sink])
    with resumable(experiment):
        summary = experiment.run()
    conclude(experiment, summary)
