"""Faults planted in a copy of the sources, each of which must make the rehearsal's tests of GPU streams fail."""

from __future__ import annotations

from tests.fault import Fault

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
        "a capture waits for the device",
        "esper/training/execution/gpu.py",
        'capture_error_mode="thread_local")',
        'capture_error_mode="thread_local"); self.synchronize()',
        "a_few_captured_epochs",
    ),
)
