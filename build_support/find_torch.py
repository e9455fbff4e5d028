"""Finding the torch that Esper will run with, even from inside pip's isolated build environment."""

import importlib.util
import os
import site
import sys
import sysconfig

# Compiled against only if no torch is installed yet; the modules then load on every torch from 2.11 on.
FALLBACK_TORCH = "torch==2.13.0"
OLDEST = (2, 11)

# Commands that compile. All others (metadata, sdist) must work without torch.
BUILD_COMMANDS = frozenset(
    {"build", "build_ext", "bdist_wheel", "editable_wheel", "develop", "install", "bdist", "bdist_egg"}
)


def see_target_packages() -> None:
    """Puts the site-packages being installed into last on ``sys.path``.

    pip isolates a build by narrowing ``sys.path`` of the target's own interpreter, so that interpreter still knows
    where its packages are, and which folder ``pip install --user`` uses, if the target sees that one. Last, so that the
    build's own setuptools keeps precedence.
    """
    paths = [sysconfig.get_path(name) for name in ("purelib", "platlib")]
    if _sees_user_site():
        paths.append(site.getusersitepackages())
    for path in paths:
        if path not in sys.path:
            sys.path.append(path)


def _sees_user_site() -> bool:
    """Whether the target imports from the user's folder. pip's isolation disables it by a variable only."""
    file = os.path.join(sys.prefix, "pyvenv.cfg")
    if sys.prefix == sys.base_prefix or not os.path.isfile(file):
        return True
    with open(file, encoding="utf-8") as lines:
        settings = [line.partition("=") for line in lines]
    return any(name.strip() == "include-system-site-packages" and "true" in value for name, _, value in settings)


def torch_is_there() -> bool:
    """Whether ``import torch`` would find a package; does not import it."""
    return importlib.util.find_spec("torch") is not None


def is_build(arguments: list[str]) -> bool:
    """Whether a setup.py command line compiles something."""
    return not BUILD_COMMANDS.isdisjoint(arguments)


def is_too_old(version: str) -> bool:
    """Whether a torch version such as ``2.13.0+cpu`` lacks the stable headers that Esper compiles against."""
    major, minor = version.split(".")[:2]
    return (int(major), int(minor)) < OLDEST
