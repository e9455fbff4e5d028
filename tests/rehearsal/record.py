"""The record of a rehearsal, in Markdown."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass

from tests.rehearsal import steps

HEAD = """# A rehearsal of the CUDA side, without a GPU

No GPU took part: no kernel of this project, of PyTorch or of NVIDIA's libraries was executed. PyTorch's CUDA build ran
for real, with its allocator, streams, events, graphs and sync warnings, and so did Esper's executors, its CUDA module's
launchers and its loop that launches graphs. The CUDA runtime, the driver and cuBLAS below them were fakes: work is
queued on streams and done late, streams are interleaved at random within the order that CUDA guarantees, and the rules
of capture are enforced. What a kernel would have done was done by the same operator of the CPU. cuDNN was switched off.

    {command}
"""


@dataclass
class Rehearsal:
    """Results with one torch, in the order of the steps."""

    torch: str
    python: str
    seeds: list[int]
    tests: list[steps.Result]
    runs: list[steps.Result]
    faults: list[steps.Result]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether all tests and runs passed, and every fault was noticed."""
        return all(result.passed for result in (*self.tests, *self.runs)) and all(
            map(noticed, self.faults)
        )


def noticed(result: steps.Result) -> bool:
    """Whether a test failed because of the fault, and not the command as a whole."""
    return result.status == 1 and bool(result.failed)


def written(rehearsals: list[Rehearsal], seconds: float, command: str) -> str:
    """The whole page; ``command`` makes it again."""
    parts = [
        HEAD.format(command=command),
        *(_section(rehearsal) for rehearsal in rehearsals),
    ]
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    parts.append(f"{machine}; {seconds:.0f} s in all, with what had to be built.\n")
    return "\n".join(parts)


def _section(rehearsal: Rehearsal) -> str:
    seeds = " and ".join(map(str, rehearsal.seeds))
    lines = [
        f"## torch {rehearsal.torch}, Python {rehearsal.python}",
        "",
        f"Interleavings: seeds {seeds}. {rehearsal.seconds:.0f} s.",
        "",
        "| step | result | seconds |",
        "|---|---|---|",
        *(
            f"| {result.name} | {_outcome(result)} | {result.seconds:.0f} |"
            for result in rehearsal.tests
        ),
        *(
            f"| `{result.name}` | {_outcome(result)} | {result.seconds:.0f} |"
            for result in rehearsal.runs
        ),
        "",
        *_details(rehearsal),
    ]
    if rehearsal.faults:
        lines += [
            "Planted faults:",
            "",
            "| fault | noticed by | seconds |",
            "|---|---|---|",
        ]
        lines += [
            f"| {_fault(result)} | {result.seconds:.0f} |"
            for result in rehearsal.faults
        ]
        lines.append("")
    return "\n".join(lines)


def _outcome(result: steps.Result) -> str:
    if result.status == steps.TIMED_OUT:
        return "NOT DONE in time"
    if not result.tests:
        return "ok" if result.passed else f"FAILED, status {result.status}"
    passed = sum(outcome == "passed" for outcome in result.tests.values())
    return (
        f"{passed} passed, {len(result.failed)} failed, {len(result.skipped)} skipped"
        + (
            ""
            if result.passed or result.failed
            else f"; FAILED, status {result.status}"
        )
    )


def _details(rehearsal: Rehearsal) -> list[str]:
    """Every test that did not pass, by name and with the reason."""
    found: dict[str, None] = {}
    for result in rehearsal.tests:
        for name, outcome in result.tests.items():
            if outcome != "passed":
                found[f"- `{name}`: {outcome}"] = None
    for result in rehearsal.runs:
        if not result.passed:
            found[f"- `{result.name}`: {result.last_line}"] = None
    return (
        ["Not passed:", "", *found, ""]
        if found
        else ["Every test passed, and every run.", ""]
    )


def _fault(result: steps.Result) -> str:
    name = result.name.removeprefix("fault: ")
    if noticed(result):
        return f"{name} | `{result.failed[0]}`"
    if result.status == steps.NOT_PLANTED:
        return f"{name} | NOT PLANTED: {result.last_line}"
    return f"{name} | NOBODY (status {result.status})"
