"""Peak memory of a piece of work."""

from collections.abc import Callable
from itertools import accumulate

import torch


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Returns the peak size of tensors alive during ``run()``, above those alive before, in bytes.

    It is counted from the allocations themselves, so it does not depend on the machine or its load.
    """
    run()  # tensors created once and kept do not count
    if device.type != "cpu":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated()) - int(before)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    assert profile.profiler is not None
    assert profile.profiler.kineto_results is not None
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    changes: list[int] = [event.nbytes() for event in events]
    return max(accumulate(changes, initial=0))
