"""`CUDATimer` and the phase ranges on a GPU: no wait before the time is read, and the GPU's time, not the host's."""

from time import perf_counter

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from esper.telemetry.span import Spans
from esper.telemetry.timer import CUDATimer

pytestmark = pytest.mark.cuda


@pytest.mark.finding("L10")
@pytest.mark.parametrize("current", ["the default stream", "another"])
def test_a_block_is_timed_without_a_wait_until_it_is_read(current: str) -> None:
    stream = (
        torch.cuda.Stream() if current == "another" else torch.cuda.default_stream()
    )
    timer = CUDATimer("cuda")
    torch.cuda._sleep(1)  # its code is loaded
    torch.cuda.synchronize()
    before = perf_counter()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(stream), timer:
            torch.cuda._sleep(200_000_000)
        left = perf_counter()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    running = not stream.query()
    seconds = timer.seconds
    assert running  # the block was left while the GPU worked
    assert stream.query()
    # What the GPU did is longer than the block took the host, and over when it could be read.
    assert left - before < seconds <= perf_counter() - before


def test_ranges_add_no_kernel_and_no_wait() -> None:
    spans, x = Spans(marks=True), torch.zeros(8, device="cuda")
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        torch.cuda.set_sync_debug_mode("error")
        try:
            with spans("train"), spans("stage"):
                x.add_(1)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    on_gpu = [
        event.name
        for event in trace.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    assert len([name for name in on_gpu if not name.startswith("esper/")]) == 1, (
        on_gpu
    )  # ranges may be shown there, too
    assert {"esper/train", "esper/stage"} <= {event.name for event in trace.events()}
