"""The `esper-bench` command. A case is one file beside this one, and one entry in `CASES`."""

import json
import sys
from pathlib import Path

import click

# Command -> module with NAME and comparisons(sizes, seed). Imported only when it runs: --help must not load torch.
CASES = {
    "cross-entropy": "esper.bench.cross_entropy",
    "grad-stats": "esper.bench.grad_stats",
    "norm-relu-pool": "esper.bench.norm_relu_pool",
    "sgd": "esper.bench.sgd",
    "stage-batch": "esper.bench.stage_batch",
}

# Columns of the table where there is no terminal to fit into: no cell is broken.
WIDE = 160


SIZE_HELP = "Tensors x elements, samples x classes, images or channels x side, as the case has it; may be repeated."


def parse_size(text: str) -> tuple[int, int]:
    """``"100x48"`` -> ``(100, 48)``."""
    tensors, separator, elements = text.partition("x")
    if not (separator and tensors.isdigit() and elements.isdigit() and int(tensors) and int(elements)):
        raise click.BadParameter(f"{text!r} is not two numbers NxK, for example 100x48")
    return int(tensors), int(elements)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("cases", nargs=-1, type=click.Choice(sorted(CASES)))
@click.option("--size", "sizes", multiple=True, metavar="NxK", help=SIZE_HELP)
@click.option("--threads", default=1, show_default=True, help="Threads inside an operator; the bars are for one.")
@click.option("--rounds", default=15, show_default=True, type=click.IntRange(min=1), help="Turns of each side.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the results as a JSON list.")
@click.option("--markdown", "markdown_file", type=click.Path(path_type=Path), help="Also write a Markdown page.")
def main(
    cases: tuple[str, ...],
    sizes: tuple[str, ...],
    threads: int,
    rounds: int,
    json_file: Path | None,
    markdown_file: Path | None,
) -> None:
    """Measure CASES (all, if none is named) against their baselines, in turns, in this process."""
    parsed = [parse_size(size) for size in sizes]

    import importlib

    import torch
    from rich.console import Console

    from esper.bench import runner, table
    from esper.config import ConfigError
    from esper.experiment.environment import summary_lines

    torch.set_num_threads(threads)
    console = Console(width=None if sys.stdout.isatty() else WIDE)
    heading = [*summary_lines(paths=False), f"Threads inside an operator: {torch.get_num_threads()}"]
    console.print("\n".join(heading), highlight=False)
    results: list[runner.Result] = []
    for case in cases or sorted(CASES):
        try:
            comparisons = importlib.import_module(CASES[case]).comparisons(parsed or None)
            results += [runner.measure(comparison, rounds) for comparison in comparisons]
        except ConfigError as error:  # what the case compares with is not installed
            if cases:
                raise click.ClickException(str(error)) from error
            console.print(f"{case} is left out: {error}")
    table.print_results(results, console)
    if json_file is not None:
        json_file.write_text(json.dumps([result.as_json() for result in results], indent=2) + "\n")
    if markdown_file is not None:
        markdown_file.write_text(table.markdown(results, heading))
