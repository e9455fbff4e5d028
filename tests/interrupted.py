"""Programs that get a signal at the moment at which they import a module."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PROGRAM = """
import os, signal, sys
from importlib.abc import MetaPathFinder


class Interrupts(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), int(sys.argv[2]))


signal.signal(int(sys.argv[2]), signal.SIG_DFL)  # it may be inherited as ignored
sys.meta_path.insert(0, Interrupts())
from PACKAGE.main import main
main()
"""


def interrupted(
    package: str, module: str, number: signal.Signals, **more: str
) -> tuple[int, str]:
    """Runs the entry point of ``package``, which gets a signal when it imports ``module``.

    Returns its exit status and all that it prints.
    """
    found = subprocess.run(
        [
            sys.executable,
            "-c",
            PROGRAM.replace("PACKAGE", package),
            module,
            str(int(number)),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **more},
        check=False,
    )
    return found.returncode, found.stdout
