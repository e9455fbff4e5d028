"""The command ``esper`` on the fake GPU: ``python -m tests.rehearsal.esper_command [--idle DEVICE] run ...``.

``--idle 0`` fails if anything made a context on GPU 0. Exit status: that of ``esper``, 1 if a rule was broken.
"""

from __future__ import annotations

import os
import sys

from tests.rehearsal import dispatch, fake_runtime

DEVICES = (0, 1)


def main(arguments: list[str]) -> int:
    """Run ``esper`` with ``arguments`` and print which devices have contexts; returns the exit status."""
    idle = int(arguments[1]) if arguments[:1] == ["--idle"] else None
    dispatch.start(int(os.environ.get("REHEARSAL_SEED", "1")))

    from esper.cli.main import main as esper

    sys.argv = ["esper", *(arguments if idle is None else arguments[2:])]
    status: object = 0
    try:
        esper()
    except SystemExit as end:
        status = end.code
    fake_runtime.drain_all()
    contexts = {device: fake_runtime.context(device) for device in DEVICES}
    print(
        "rehearsal: contexts made by",
        {device: made_by for device, made_by in contexts.items() if made_by},
    )
    print(
        "rehearsal:",
        ", ".join(
            f"{fake_runtime.count(what)} {what}"
            for what in ("operators", "graph launches")
        ),
    )
    found = dispatch.take_failures()
    if idle is not None and contexts[idle]:
        found.append(
            f"{contexts[idle]} made a context on GPU {idle}, which nothing uses"
        )
    for failure in found:
        print("rehearsal:", failure)
    return 1 if found or status not in (0, None) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
