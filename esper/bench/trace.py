"""A trace of one turn of each case, for chrome://tracing or Perfetto."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile, record_function  # type: ignore[attr-defined]


class TraceFile:
    """Profiles turns one by one and writes them to one file."""

    def __init__(self) -> None:
        self.trace: dict[str, Any] = {"traceEvents": []}

    def add(self, name: str, run: Callable[[], object]) -> None:
        """Profiles one call of ``run``, including its other threads, as a span called ``name``."""
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        everywhere = _ExperimentalConfig(profile_all_threads=True)
        with profile(activities=activities, experimental_config=everywhere) as profiler, record_function(name):
            run()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(file))
            turn = json.loads(file.read_text())
        events = self.trace["traceEvents"] + turn["traceEvents"]
        self.trace = {**turn, "traceEvents": events}

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.trace))
