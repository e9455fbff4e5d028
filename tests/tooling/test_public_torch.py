"""Esper calls what torch promises to keep: no name of torch's that begins with an underscore, but for those listed."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

ALLOWED = {
    "torch._dynamo.lookup_backend": "the documented way for a backend to go on to another one",
    "torch.nn.modules.batchnorm._BatchNorm": "the class that all BatchNorms have in common; it has no public name",
    "torch.nn.modules.batchnorm._NormBase": "their class without its name, which tools replace by other layers",
    "torch._C._functorch.maybe_current_level": "nothing public says whether a pass lies in vmap or another transform",
    "torch.autograd.forward_ad._current_level": "nothing public says whether derivatives are computed forward",
}
"""Private name: why it is used nevertheless."""


def private_names(source: str) -> set[str]:
    """Names of torch's, written out from ``torch.`` on, that are private or lie in something private."""
    tree = ast.parse(source)
    known: dict[str, str] = {}
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                package = alias.name.partition(".")[0]
                known[alias.asname or package] = alias.name if alias.asname else package
                found |= private(alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                found |= private(f"{node.module}.{alias.name}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found |= private(dotted(node, known))
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "getattr"
        ):
            owner, *name = node.args[:2]
            if name and isinstance(name[0], ast.Constant):
                found |= private(f"{dotted(owner, known)}.{name[0].value}")
    return found


def dotted(node: ast.AST, known: dict[str, str]) -> str:
    """``F.relu`` as ``torch.nn.functional.relu``; empty for what is no name of an imported module."""
    if isinstance(node, ast.Name):
        return known.get(node.id, "")
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value, known)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


def private(name: str) -> set[str]:
    parts = name.split(".")
    hidden = any(part.startswith("_") and not part.endswith("__") for part in parts)
    return {name} if parts[0] == "torch" and hidden else set()


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import torch as t\nt._foreach_norm([x])", {"torch._foreach_norm"}),
        ("from torch import _foreach_norm as norm", {"torch._foreach_norm"}),
        ("from torch._C import _profiler", {"torch._C._profiler"}),
        ("import torch\ngetattr(torch, '_foreach_norm')", {"torch._foreach_norm"}),
        (
            "import torch\ntorch.nn.Module.__init__(self)\nself._mine = torch.zeros(1).add_(1)",
            set(),
        ),
    ],
)
def test_a_private_name_is_found(source: str, names: set[str]) -> None:
    assert names <= private_names(source)
    assert bool(names) == bool(private_names(source))


@pytest.mark.finding("M6")
def test_no_private_api_of_torch_is_called() -> None:
    used = {
        name: path.relative_to(ROOT)
        for path in sorted((ROOT / "esper").rglob("*.py"))
        for name in private_names(path.read_text(encoding="utf-8"))
    }
    assert set(used) == set(ALLOWED), used
    for path in (ROOT / "csrc").rglob("*.*"):
        assert "_foreach_" not in path.read_text(encoding="utf-8"), path


@pytest.mark.finding("M6")
@pytest.mark.parametrize(
    "twin",
    [
        "twins.py",
        "cross_entropy_twin.py",
        "norm_relu_pool_cases.py",
        "stage_batch_twin.py",
    ],
)
def test_references_of_operators_are_public(twin: str) -> None:
    assert (
        private_names((ROOT / "tests" / "ops" / twin).read_text(encoding="utf-8"))
        == set()
    )
