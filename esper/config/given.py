"""Types of values on a command line."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import click


class GivenPath(click.Path):
    """A path that a shell hands over: not empty, and with the home folder in the place of a leading tilde."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Returns the path, or ends the command with exit code 2 and a sentence."""
        if not str(value):
            self.fail("the path is empty; the current folder is .", param, ctx)
        path = os.path.expanduser(value)  # a shell leaves the tilde of --out=~/x
        if str(path).startswith("~"):
            self.fail(f"{value}: there is no such user; ./~NAME is a folder of this name", param, ctx)
        return super().convert(path, param, ctx)


class FiniteRange(click.FloatRange):
    """A number in a range; NaN lies in none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Returns the number, or ends the command with exit code 2 and a sentence."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


COUNT = click.IntRange(min=1, max=2**31 - 1)
PATH = GivenPath(path_type=Path)
FILE = GivenPath(path_type=Path, dir_okay=False)
