"""Share of the time in which a GPU is idle."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile


def idle_share(spans: Iterable[tuple[int, int]]) -> float:
    """Returns the share, in %, of the time from the first start to the last end that none of the ``spans`` covers.

    Args:
        spans: (start, end) of each piece of work.

    Raises:
        ValueError: there are no spans.
    """
    ordered = sorted(spans)
    if not ordered:
        raise ValueError("nothing ran on the GPU")
    begin, reached, busy = ordered[0][0], ordered[0][0], 0
    for start, end in ordered:
        busy += max(0, end - max(start, reached))
        reached = max(reached, end)
    return 100 * (1 - busy / (reached - begin))


def device_idle(run: Callable[[], object]) -> float:
    """Returns the share of the time, in %, in which the GPU ran no kernel and no copy during ``run()``, on any stream.

    The profiler makes every launch slightly longer, so the result tends to be too high.
    """
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    events = [
        event
        for event in profiler.profiler.kineto_results.events()
        if event.device_type() == DeviceType.CUDA and not event.is_user_annotation()
    ]
    return idle_share((event.start_ns(), event.start_ns() + event.duration_ns()) for event in events)
