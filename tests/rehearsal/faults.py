"""Faults planted in a copy of the sources, each of which must make the rehearsal's tests fail."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Fault:
    """An edit of one file, whose old text must be there exactly once, and tests that must notice it."""

    name: str
    file: str
    old: str
    new: str
    tests: str
    """An expression for ``pytest -k``, among tests/cuda/test_gpu_streams.py."""

    def plant(self, root: Path) -> None:
        """Edit the file below ``root``. Raises ValueError if the old text is not there exactly once."""
        path = root / self.file
        text = path.read_text()
        found = text.count(self.old)
        if found != 1:
            raise ValueError(f"{self.file} must have this once, and has it {found} times: {self.old}")
        path.write_text(text.replace(self.old, self.new))


FAULTS = (
    Fault(
        "streams are not waited for",
        "esper/training/execution/gpu.py",
        "current.wait_stream(stream)",
        "stream.query()",
        "rates_alphas",
    ),
    Fault(
        "an upload goes to the default stream, in the middle of a stream's work",
        "esper/training/batches.py",
        "    into.copy_(",
        "    import torch\n\n"
        "    with torch.cuda.stream(torch.cuda.default_stream(into.device) if into.is_cuda else None):\n"
        "        into.copy_(",
        "rates_alphas",
    ),
    Fault(
        "all graphs are launched on the first host's stream",
        "esper/training/execution/gpu.py",
        "[stream.cuda_stream for stream in streams]",
        "[streams[0].cuda_stream for _ in streams]",
        "rates_alphas",
    ),
    Fault(
        "a capture waits for the device",
        "esper/training/execution/gpu.py",
        'capture_error_mode="thread_local")',
        'capture_error_mode="thread_local"); self.synchronize()',
        "a_few_captured_epochs",
    ),
)
