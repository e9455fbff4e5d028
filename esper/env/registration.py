"""Registers ``esper/Growth-v0`` with Gymnasium, without importing Gymnasium or torch before they are needed."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

ID = "esper/Growth-v0"


def register() -> None:
    """Registers the id; its entry points are imported when an env is made."""
    import gymnasium

    if ID not in gymnasium.registry:
        gymnasium.register(
            id=ID,
            entry_point="esper.env.entry_points:make_single",
            vector_entry_point="esper.env.entry_points:make_vector",
        )


def register_when_imported() -> None:
    """Registers now if Gymnasium is already imported, else as soon as it is.

    Gymnasium does not read entry points of packages, and sorted imports put ``import esper`` first.
    """
    if "gymnasium" in sys.modules:
        register()
    else:
        sys.meta_path.insert(0, _AfterGymnasium())


class _AfterGymnasium(MetaPathFinder, Loader):
    """Import hook that lets Gymnasium load as usual, once, and then registers the id."""

    def __init__(self) -> None:
        self.loader: Loader | None = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "gymnasium":
            return None
        sys.meta_path.remove(self)
        found = importlib.util.find_spec(fullname)
        if found is not None:
            self.loader, found.loader = found.loader, self
        return found

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        assert self.loader is not None
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert self.loader is not None
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        register()
