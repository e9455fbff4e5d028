"""A controller as commands, configs, folders and Python name it: one grammar, which only this module reads.

It is ``NAME``, ``KIND:PATH``, ``path.py:function``, or a callable that makes a controller for an env.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from esper.errors import ConfigError, did_you_mean

FORM = "path.py:function"
"""A function or class in a custom Python file; also the kind of such controllers."""
UNNAMED = "callable"
"""The kind of callables that no file and name lead to; they are recorded as ``callable:NAME``."""
NAMES = (
    "ppo",
    "checkpoint:PATH",
    "pretrained",
    "sampled:PATH",
    "advisor",
    "heuristic",
    "plateau",
    "need",
    "random",
    "none",
    "schedule",
    "schedule:FILE.toml",
    FORM,
)
"""The forms of all controllers."""
SAVED = ("checkpoint", "pretrained", "sampled")
"""Kinds of trained agents that are read from files; ``sampled`` draws its actions, the others play the likeliest."""
FORMS_OF_AGENTS = "give the folder of a ppo run, its checkpoint.pt, a policy in a .safetensors file, or pretrained"
ALONE = "none"
"""Leaves hosts alone."""
UNTRAINED = "untrained"
"""Name of an agent with its first weights, as an arm."""


@dataclass(frozen=True)
class ControllerSpec:
    """The parsed name of a controller."""

    name: str
    """The name that it is recorded under."""
    kind: str
    """``NAME`` or ``KIND``; that of ``path.py:function`` is ``FORM``."""
    path: str = ""
    """The file or run folder behind its kind, or the Python file; empty if it names none."""
    function: str = ""
    """The function or class of the Python file."""
    make: Callable[..., Any] | None = None
    """The callable, if it was given itself."""

    @classmethod
    def of(cls, controller: str | Callable[..., Any]) -> ControllerSpec:
        """Parses any name, also one that no controller has. Raises ConfigError for neither a name nor a callable."""
        if not isinstance(controller, str):
            return replace(cls.of(_name_of(controller)), make=controller)
        code = re.fullmatch(r"([^:]+\.py)(?::(.*))?", controller)
        if code:
            return cls(controller, FORM, os.path.expanduser(code[1]), code[2] or "")
        kind, _, path = controller.partition(":")
        if not path:
            kind = controller  # with a colon that nothing follows, it is no kind
        return cls(controller, kind, os.path.expanduser(path))  # a shell leaves a tilde behind a colon

    @property
    def is_code(self) -> bool:
        """Whether it names custom Python code."""
        return self.kind == FORM

    @property
    def learns(self) -> bool:
        """Whether it learns during a run."""
        return self.name == "ppo"

    @property
    def is_trained(self) -> bool:
        """Whether it plays by what was learned, in its run or before."""
        return self.kind in ("ppo", *SAVED)

    @property
    def follows(self) -> bool:
        """Whether it plays by a file that is no code: a schedule or a trained agent."""
        return self.kind in ("schedule", *SAVED)

    @property
    def alone(self) -> bool:
        """Whether it leaves hosts alone."""
        return self.name == ALONE

    @property
    def known(self) -> bool:
        """Whether it has one of the forms of ``NAMES``."""
        forms = map(ControllerSpec.of, NAMES)
        return any(form.kind == self.kind and bool(form.path) == bool(self.path) for form in forms)

    @property
    def short(self) -> str:
        """A name for folders: its file's or its run's, if it has one."""
        return Path(self.path).stem if self.path else self.kind

    def check(self) -> ControllerSpec:
        """Returns itself. Raises ConfigError, with the known names, unless it can be played as it is."""
        if self.make is not None:
            return self
        if self.name == "ppo":
            raise ConfigError(
                "ppo must be trained before it can be compared: train it with `esper run`, then name "
                "checkpoint:RUN_FOLDER"
            )
        self.require_known()
        if self.kind in SAVED and self.path.endswith(".zip"):
            raise ConfigError(
                f"{self.name} is no agent of Esper's; play a model of Stable-Baselines3 through a function in a Python "
                f"file, {FORM}, as in examples/sb3_controller.py"
            )
        return self

    def require_known(self) -> None:
        """Raises ConfigError, with the known names, for a name that no controller has."""
        if self.make is None and not self.known:
            raise self.unknown()

    def require_there(self) -> ControllerSpec:
        """Returns itself. Raises ConfigError if the file or run folder that it names does not exist, or is neither."""
        if not self.path:
            return self
        path = Path(self.path)
        if not path.exists():
            raise ConfigError(f"{self.name!r}: {self.path} does not exist")
        if self.is_code or self.kind in SAVED:
            require_no_pipe(path, "Python file" if self.is_code else "checkpoint")
        return self

    def unknown(self) -> ConfigError:
        """Makes the error for an unknown name, with the known names."""
        similar = did_you_mean(self.name, NAMES)
        return ConfigError(f"unknown controller {self.name!r}{similar}; known: {', '.join(NAMES)}")

    def same_as(self, other: ControllerSpec) -> bool:
        """True if both name the same controller; a custom file may have moved if its function has the same name."""
        same_code = self.is_code and other.is_code and self.function == other.function
        return self.name == other.name or same_code

    def following(self, copy: Path) -> str:
        """Returns the name of a controller that plays by a copy of what this one follows, or by what it has learned."""
        kind = "checkpoint" if self.kind in ("ppo", "pretrained") else self.kind
        return f"{kind}:{copy}"


def require_no_pipe(path: Path, kind: str) -> None:
    """Raises ConfigError, with the ``kind`` of file that was expected, for a pipe, which may never end."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ConfigError(f"{path} is not a {kind}: it is a pipe or a device")


def _name_of(controller: Callable[..., Any]) -> str:
    """Returns ``path.py:function`` for a function or class of a module, else ``callable:NAME``."""
    if not callable(controller):
        raise ConfigError(
            f"controller is a {type(controller).__name__}; expected a name, or a function that makes a controller for "
            "an env"
        )
    called = controller
    if isinstance(controller, partial):
        called = controller.func  # a partial has no name of its own
    name = str(getattr(called, "__qualname__", type(called).__name__))
    module = sys.modules.get(getattr(controller, "__module__", None) or "")
    file = str(getattr(module, "__file__", None) or "")
    # A name is recorded only if it leads back to the same object.
    if getattr(module, name, None) is not controller or not file.endswith(".py"):
        return f"{UNNAMED}:{name}"
    path = Path(file).absolute()
    folder = Path.cwd()
    if path.is_relative_to(folder):
        return f"{os.path.relpath(path, folder)}:{name}"
    return f"{path}:{name}"
