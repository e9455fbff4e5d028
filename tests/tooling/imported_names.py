"""Whether the names exist that a piece of code imports from Esper; without running it."""

from __future__ import annotations

import ast
from importlib import import_module
from importlib.util import find_spec


def missing_imports(code: str) -> list[str]:
    """Modules and names of Esper that are imported somewhere in ``code`` and do not exist.

    Raises:
        SyntaxError: if ``code`` cannot be compiled.
    """
    missing: list[str] = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            modules = [
                alias.name
                for alias in node.names
                if alias.name.split(".")[0] == "esper"
            ]
            missing += [name for name in modules if find_spec(name) is None]
        elif (
            isinstance(node, ast.ImportFrom)
            and (node.module or "").split(".")[0] == "esper"
        ):
            module = str(node.module)
            missing += [
                f"{module}.{alias.name}"
                for alias in node.names
                if not _found(module, alias.name)
            ]
    return missing


def _found(module: str, name: str) -> bool:
    if "integrations" in module:  # imports libraries that need not be installed
        return find_spec(module) is not None
    found = import_module(module)
    return hasattr(found, name) or (
        hasattr(found, "__path__") and find_spec(f"{module}.{name}") is not None
    )
