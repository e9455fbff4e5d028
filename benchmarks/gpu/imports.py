"""Import what later steps import, so that a broken package is found once and early.

    python -m benchmarks.gpu.imports kernels|runs

`kernels`: what the tests of single kernels need, the CUDA module included. `runs`: also what hosts in training,
`esper run` and the measurements need. Exit status: 0 if everything can be imported, else 1, and the last line says why.
"""

from __future__ import annotations

import importlib
import sys

KERNELS = ("numpy", "pytest", "hypothesis", "torch", "esper.ops")


def needed(kind: str) -> list[str]:
    """Names of the modules to import."""
    if kind == "kernels":
        return [*KERNELS]
    from benchmarks.gpu.plan import MEASURED
    from esper.bench import CASES

    modules = {CASES[case] for cases in MEASURED.values() for case in cases}
    return [
        *KERNELS,
        *(f"esper.bench.{module}" for module in sorted(modules)),
        "esper.cli.main",
        "esper.run.experiment",
        "sklearn.datasets",
    ]


def problems(kind: str) -> list[str]:
    """One message for each module that cannot be imported, and for a missing CUDA module."""
    found = []
    try:
        names = needed(kind)
    except ImportError as error:
        return [str(error)]
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # a broken package can raise anything
            found.append(f"{name}: {error}")
    if not found:
        from esper.ops import _native

        found += [
            f"{module.name}: {module.reason}"
            for module in _native.modules()
            if not module.loaded
        ]
    return found


def main() -> int:
    """Import everything; return the exit status."""
    found = list(dict.fromkeys(problems(sys.argv[1])))
    print("; ".join(found) if found else "everything can be imported")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
