"""Every example runs as its page says, at small size."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.selection import slow_except
from tests.tooling.imported_names import missing_imports

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FILES = sorted(path.name for path in EXAMPLES.glob("*.py"))
NEEDS = {"accelerate_loop.py": "accelerate", "gpt2_lora.py": "transformers"}
"""Libraries of the extra `integrations` that examples import."""
RUN = """
import importlib.util, runpy, sys
from esper.hosts.zoo import import_torchvision
if importlib.util.find_spec("torchvision"):
    import_torchvision()  # transformers imports it, which fails with a CPU build of torch without this
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_example(name: str, size: str, folder: Path) -> str:
    """Runs an example in ``folder`` and returns what it prints."""
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent)}
    command = [sys.executable, "-c", RUN, str(EXAMPLES / name), size]
    finished = subprocess.run(
        command, capture_output=True, text=True, cwd=folder, env=environment
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


@pytest.mark.parametrize(
    "name",
    slow_except(set(FILES) - {"masked_ppo.py", "own_loop.py", "resnet.py"}, FILES),
)
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    library = NEEDS.get(name)
    if library is not None and importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed; see the extra integrations")
    assert "test: " in run_example(name, "4", tmp_path)


@pytest.mark.slow  # 40,000 steps of the agent, half a minute
def test_the_agent_in_one_file_learns(tmp_path: Path) -> None:
    """Chance is −0.02 to 0.09; five seeds ended at 1.82 to 1.87 after 64,000 steps."""
    printed = run_example("masked_ppo.py", "25", tmp_path)
    assert float(re.findall(r"mean return +([-\d.]+)", printed)[0]) < 0.1
    assert float(re.findall(r"test: mean return ([-\d.]+)", printed)[0]) > 1.2


@pytest.mark.parametrize("name", FILES)
def test_imports_of_an_example_exist(name: str) -> None:
    assert missing_imports((EXAMPLES / name).read_text(encoding="utf-8")) == []


def test_the_page_lists_every_example() -> None:
    page = (EXAMPLES / "README.md").read_text()
    assert [name for name in FILES if f"`{name}`" not in page] == []


NOTEBOOK = """
import ast, json, sys
book = json.load(open(sys.argv[1]))
space = {}
for cell in book["cells"]:
    if cell["cell_type"] != "code":
        continue
    tree = ast.parse("".join(cell["source"]))
    shown = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), space)
    if shown is not None:
        value = eval(compile(ast.Expression(shown.value), "cell", "eval"), space)
        html = getattr(value, "_repr_html_", None)
        print(html() if html else repr(value))
"""


def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path) -> None:
    """As Jupyter runs it: cells in order, and the last expression of each is shown."""
    finished = subprocess.run(
        [sys.executable, "-c", NOTEBOOK, str(EXAMPLES / "first_growth.ipynb")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent)},
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    for part in (
        "<table>",
        "Growth in 20 epochs: ",
        "<svg",
        "task digits",
        "alone: advisor",
    ):
        assert part in finished.stdout


def test_the_notebook_has_no_outputs() -> None:
    text = (EXAMPLES / "first_growth.ipynb").read_text(encoding="utf-8")
    assert '"execution_count": null' in text
    assert '"outputs": []' in text
    assert "image/png" not in text
