"""The `esper` command group. Subcommands are imported only when called, so that ``--help`` is fast."""

from __future__ import annotations

import errno
import importlib
import os
import sys
from typing import NoReturn

import click

from esper import __version__
from esper.errors import ConfigError, did_you_mean, is_of_a_path
from esper.run.interrupt import interrupts_end
from esper.telemetry.text import print_anywhere

COMMANDS = {
    "demo": "See in two minutes what Esper does: the advisor sizes hosts beside the same hosts left alone.",
    "run": "Grow hosts with a controller, and compare them with the same hosts left alone.",
    "compare": "Compare controllers on the same hosts, pair by pair.",
    "eval": "Evaluate a trained agent on held-out hosts, of its own or another task or width.",
    "report": "Write an HTML page about one or more runs, or about a comparison.",
    "show": "Show the status of a run, finished or in progress.",
    "info": "Show versions, hardware and compiled modules; or the observation or the configuration.",
    "sites": "List where seeds can grow in a model of your own.",
    "tasks": "List the tasks, blueprints and controllers.",
}

PLACES = {"tasks": "info.tasks", "sites": "info.sites", "show": "report.show"}
"""Module and name of commands that are not ``NAME.command``."""

EXIT_CODES = {
    "0": "done",
    "1": "an error while running; completed work is kept, and the message says how to resume",
    "2": "invalid input; nothing was started",
    "130": "interrupted by Ctrl-C or SIGTERM; completed work is kept, as after an error",
}


class LazyGroup(click.Group):
    """A group whose commands are defined as ``esper.cli.NAME.command``, or at one of ``PLACES``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = PLACES.get(cmd_name, f"{cmd_name}.command").partition(".")
        with interrupts_end():
            command: click.Command = getattr(importlib.import_module(f"esper.cli.{module}"), name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            known = ", ".join(COMMANDS)
            raise click.UsageError(f"no command {args[0]!r}{did_you_mean(args[0], COMMANDS)}; known: {known}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Exit codes"):
            formatter.write_dl(list(EXIT_CODES.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="esper")
def group() -> None:
    """Esper grows neural networks while they train."""


def end_without_reader() -> NoReturn:
    """Ends the process after the reader of a pipe has gone; closing stdout must not raise the error again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(1)


def run() -> None:
    """Runs the command and exits with one of ``EXIT_CODES``."""
    print_anywhere()
    try:
        code = group(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except ConfigError as error:
        click.echo(f"Error: {error}", err=True)
        if "RANK" in os.environ:
            from esper.cli.launch import note_refusal

            note_refusal()
        sys.exit(2)
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            end_without_reader()
        if error.errno == errno.ENOSPC and error.filename is None:
            click.echo(f"Error: {error.strerror}", err=True)
            end_without_reader()
        if not is_of_a_path(error):
            raise
        click.echo(f"Error: {error.filename}: {error.strerror}; give another path", err=True)
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        click.echo("Interrupted.", err=True)
        sys.exit(130)
    sys.exit(code)  # None, or the code of a click.exceptions.Exit, which click returns in this mode
