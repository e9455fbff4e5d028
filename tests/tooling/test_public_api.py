"""`import esper`: cheap, small, and every name of it is there."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys

import pytest

import esper
from tests.tooling.test_imports import closure


def test_importing_esper_imports_nothing_heavy() -> None:
    script = (
        "import random, sys, esper\n"
        "before = random.getstate()\n"
        "assert 'Experiment' in dir(esper)\n"
        "heavy = ('torch', 'gymnasium', 'numpy', 'scipy', 'sklearn', 'pydantic', 'rich', 'click')\n"
        "print([name for name in heavy if name in sys.modules])\n"
        "esper.TrainingConfig\n"
        "print([name for name in heavy[:5] if name in sys.modules])\n"
        "esper.Experiment\n"
        "print('torch' in sys.modules, 'gymnasium' in sys.modules)\n"
        "esper.grow\n"
        "print('rich' in sys.modules, random.getstate() == before)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert found.stdout.splitlines() == ["[]", "[]", "True True", "True True"]


def test_a_grower_loads_what_it_says_and_no_more() -> None:
    """Nothing is loaded besides what the files say that it needs, such as by a package on the way to it."""
    script = "import sys\nfrom esper import Grower\nprint(*(name for name in sys.modules if name.startswith('esper.')))"
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    loaded = {name.removeprefix("esper.") for name in found.stdout.split()}
    assert loaded - {"_C"} == set(closure("grower.grower"))


@pytest.mark.parametrize("name", esper.__all__)
def test_each_name_is_the_thing_itself_with_a_manual(name: str) -> None:
    thing = getattr(esper, name)
    assert thing is getattr(importlib.import_module(thing.__module__), name)
    assert inspect.getdoc(thing)
    assert f"``{name}``" in (esper.__doc__ or "")


def test_from_esper_import_works() -> None:
    from esper import Experiment, TrainingConfig, __version__

    assert (Experiment.__name__, TrainingConfig.__name__) == (
        "Experiment",
        "TrainingConfig",
    )
    assert __version__ == esper.__version__


def test_a_name_that_is_not_there_lists_those_that_are() -> None:
    with pytest.raises(
        AttributeError,
        match=r"module 'esper' has no attribute 'Experimint'; it has: Advice",
    ):
        esper.Experimint  # noqa: B018
    assert not hasattr(esper, "load_hosts")
