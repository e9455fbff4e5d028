"""The command in a process of its own, for tests that interrupt it or stop reading from it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# The child resets SIGINT: it is ignored in the children of some shells and CI runners.
CHILD = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "sys.argv[0] = 'esper'; from esper.cli.main import main; main()"
)


def start(*arguments: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-c", CHILD, *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
