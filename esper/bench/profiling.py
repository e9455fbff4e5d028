"""Measurements by torch's profiler: traces, the idle time of a GPU, the peak memory of tensors."""

import json
import tempfile
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile, record_function  # type: ignore[attr-defined]


def chrome_trace(name: str, run: Callable[[], object]) -> dict[str, Any]:
    """Returns the trace of one call of ``run``, other threads included, as a span called ``name``."""
    all_threads = _ExperimentalConfig(profile_all_threads=True)
    with profile(experimental_config=all_threads) as profiler, record_function(name):
        run()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        return dict(json.loads(file.read_text()))


def device_idle(run: Callable[[], object]) -> float:
    """Returns the share of the time, in %, in which the GPU ran no kernel and no copy during ``run()``, on any stream.

    The profiler makes every launch slightly longer, so the result tends to be too high.
    """
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    work = [e.time_range for e in profiler.events() if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
    return idle_share([(span.start, span.end) for span in work])


def idle_share(spans: Sequence[tuple[float, float]]) -> float:
    """Returns the share, in %, of the time from the first start to the last end that no span (start, end) covers.

    Raises ValueError if there are no spans.
    """
    if not spans:
        raise ValueError("nothing ran on the GPU")
    starts, ends = np.array(sorted(spans)).T
    # At each start, the latest end so far: what lies between the two is idle.
    reached = np.maximum.accumulate(ends)
    idle = np.maximum(starts[1:] - reached[:-1], 0).sum()
    return float(100 * idle / (reached[-1] - starts[0]))


def peak_megabytes(run: Callable[[], object], device: torch.device) -> float:
    """Returns the peak size of tensors alive during ``run()``, above those alive before, in MB.

    It is counted from the allocations themselves, so it does not depend on the machine or its load.
    """
    run()  # tensors created once and kept do not count
    if device.type == "cpu":
        return _peak_on_cpu(run)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def _peak_on_cpu(run: Callable[[], object]) -> float:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    results = None if profiler.profiler is None else profiler.profiler.kineto_results
    if results is None:
        raise RuntimeError("torch's profiler returned no results")
    # An allocation has a positive number of bytes, a release a negative one.
    events = [event for event in results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    alive = accumulate((event.nbytes() for event in events), initial=0)
    return float(max(alive) / 1e6)
