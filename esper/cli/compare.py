"""`esper compare`: controllers on the same hosts, pair by pair."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from esper.cli.options import build_config, config_options
from esper.config import ConfigError, TrainingConfig

if TYPE_CHECKING:
    from esper.experiment.compare import Arm, ArmComparison


@click.command("compare")
@config_options
@click.option("--arm", "arms", multiple=True, required=True, help="A controller; give two or more.")
@click.option("--pairs", default=10, show_default=True, type=click.IntRange(min=1), help="Hosts that every arm grows.")
@click.option("--reference", help="The arm that the others are compared with.  [default: none, or else the last arm]")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write every pair's values, new file.")
def command(
    arms: tuple[str, ...],
    pairs: int,
    reference: str | None,
    json_file: Path | None,
    config_file: Path | None,
    assignments: tuple[str, ...],
    **flags: Any,
) -> None:
    """Compare controllers on the same hosts: same weights, same batches, test accuracy of what was kept.

    Fewer than 10 pairs are allowed, and are said to be inconclusive.
    """
    config = build_config(config_file, assignments, flags, {})
    ignored = [a for a in assignments if a.partition("=")[0].strip() in ("run.controller", "run.rounds")]
    if ignored:  # the config of a run has them, too, and may be given as it is
        raise ConfigError(f"{ignored[0]} means nothing here: --arm and --pairs say what is played")
    reference = reference or ("none" if "none" in arms else arms[-1])
    if len(arms) < 2 or reference not in arms:
        raise ConfigError(f"give two or more --arm, the reference among them; got {', '.join(arms)} and {reference}")
    if json_file is not None and (json_file.exists() or not json_file.absolute().parent.is_dir()):
        raise ConfigError(f"--json {json_file}: give a new file in a folder that exists")

    from esper.experiment.compare import against_reference, compare_controllers
    from esper.telemetry.sinks.console import ConsoleSink, TerminalConsole

    found = compare_controllers(config, arms, pairs, progress=ConsoleSink(TerminalConsole()).handle)
    comparisons = against_reference(found, reference)
    _print_arms(found, pairs, config.run.seed)
    _print_comparisons(comparisons, pairs, reference)
    if json_file is not None:
        _write_json(json_file, config, pairs, found, comparisons)


def _print_arms(arms: Sequence[Arm], pairs: int, seed: int) -> None:
    from esper.telemetry.sinks.console import count

    click.echo(f"\nTest accuracy of committed hosts after the last epoch, {count(pairs, 'pair')}, seed {seed}\n")
    click.echo(f"{'arm':28s} {'mean %':>7s} {'std':>5s} {'seeds kept':>10s} {'parameters':>10s}")
    for arm in arms:
        spread = f"{arm.accuracy.std(ddof=1):5.2f}" if pairs > 1 else "    -"
        click.echo(
            f"{arm.controller:28s} {arm.accuracy.mean():7.2f} {spread} {arm.fossils.mean():10.1f} "
            f"{arm.parameters.mean():10.0f}"
        )


def _print_comparisons(comparisons: Sequence[ArmComparison], pairs: int, reference: str) -> None:
    from esper.telemetry.sinks.console import count

    number = count(len(comparisons), "comparison")
    click.echo(f"\nPaired differences to {reference!r}, pp (p corrected for {number}, Holm)\n")
    for comparison in comparisons:
        c = comparison.pair
        interval = f"95 % interval {c.interval.low:+.2f} to {c.interval.high:+.2f}" if pairs > 1 else "no interval"
        click.echo(
            f"{c.name_a:28s} {c.difference:+6.2f}  {interval}  p = {comparison.adjusted_p:.2g}  "
            f"{c.wins} better, {c.ties} equal, {c.losses} worse"
        )
        click.echo(f"{'':28s} {comparison.verdict}")


def _write_json(
    file: Path, config: TrainingConfig, pairs: int, arms: Sequence[Arm], comparisons: Sequence[ArmComparison]
) -> None:
    from esper.experiment.environment import describe_environment
    from esper.experiment.files import write_json

    values = {a.controller: {k: getattr(a, k).tolist() for k in ("accuracy", "parameters", "fossils")} for a in arms}
    results = [{**asdict(c.pair), "adjusted_p": c.adjusted_p, "verdict": c.verdict} for c in comparisons]
    environment = describe_environment()
    environment["modules"] = sorted(environment["modules"])
    write_json(
        file,
        {
            "config": config.model_dump(mode="json"),
            "pairs": pairs,
            "arms": values,
            "comparisons": results,
            "environment": environment,
        },
    )
