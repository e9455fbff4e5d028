"""The Python of the pages runs as a reader would paste it."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.selection import slow_except
from tests.tooling.test_docs import CLI, ROOT, WITH_PYTHON, blocks, named

START = ROOT / "docs" / "policies.md"
QUICK = [START, ROOT / "docs" / "quickstart.md", ROOT / "docs" / "lightning.md"]
"""Pages whose code runs in the default suite; that of the others takes longer and runs in the slow one."""
NEEDS = {
    "lightning.md": ("lightning",),
    "transformers.md": ("transformers", "accelerate"),
}
"""Libraries of the extra `integrations` that the code of a page imports."""
SHIM = """
import importlib.util
from esper.hosts.zoo import import_torchvision
if importlib.util.find_spec("torchvision"):
    import_torchvision()  # these libraries import it, which fails with a CPU build of torch without this
"""


@pytest.mark.parametrize("page", slow_except(QUICK, WITH_PYTHON), ids=named)
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    """Its blocks one after the other, as a reader would paste them; in a process of their own, in an empty folder."""
    # Ctrl-C works as for a reader at a terminal: it is ignored in the children of some shells and CI runners.
    ctrl_c = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    libraries = NEEDS.get(page.name, ())
    if missing := [
        name for name in libraries if importlib.util.find_spec(name) is None
    ]:
        pytest.skip(f"{', '.join(missing)} not installed; see the extra integrations")
    script = "\n".join(
        [ctrl_c, *([SHIM] if libraries else []), *blocks(page, "python")]
    )
    found = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    if page == START:
        table = CLI.read_text(encoding="utf-8").partition("## The run folder")[2]
        named_files = set(re.findall(r"`([\w.]+\.\w+)`", table.partition("\n## ")[0]))
        written = {path.name for path in (tmp_path / "runs" / "first").iterdir()}
        assert written == named_files - {"schedule.toml", "life.svg"}
