"""Time hosts that are trained alone: seconds, seconds of processor time, and the mean accuracy of three runs.

    python benchmarks/left_alone.py TASK HOSTS

To compare two versions of Esper, run it in a checkout of each, in turns.
"""

from __future__ import annotations

import argparse
import time

import torch

from esper.config import RunConfig, TrainingConfig
from esper.data.task import resolve
from esper.data.tasks import load_task
from esper.env.no_growth import measure_baseline
from esper.training.execution.tiers import make_executor

RUNS = 4
"""The first one is not printed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task")
    parser.add_argument("hosts", type=int)
    arguments = parser.parse_args()
    values = {
        "task": {"name": arguments.task},
        "env": {"baseline_episodes": arguments.hosts},
    }
    task = load_task(arguments.task)
    config = resolve(TrainingConfig.parse(values), task)
    executor = make_executor(RunConfig(), torch.device("cpu"))
    for run in range(RUNS):
        begun, worked = time.perf_counter(), time.process_time()
        baseline = measure_baseline([task], config, executor, run)
        seconds = time.perf_counter() - begun
        processor = time.process_time() - worked
        accuracy = sum(baseline.accuracy) / len(baseline.accuracy)
        if run > 0:
            print(f"{seconds:.3f} {processor:.3f} {accuracy:.4f}", flush=True)


if __name__ == "__main__":
    main()
