"""Printing lists for a terminal of any width."""

from __future__ import annotations

import shutil
import sys
import textwrap

import click


def echo_folded(line: str, indent: int) -> None:
    """Prints a line; in a terminal, it is folded between words and goes on ``indent`` columns to the right."""
    if sys.stdout.isatty():
        line = textwrap.fill(
            line,
            shutil.get_terminal_size().columns,
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
    click.echo(line)
