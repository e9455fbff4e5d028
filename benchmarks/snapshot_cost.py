"""Cost of a snapshot beside the epoch that it secures: CPU time of one thread.

    python benchmarks/snapshot_cost.py --out benchmarks/results/snapshot_cost.md

Hosts of `digits`, the default one and wider ones, each with a fossil in every slot. An epoch is training and
validation with all counterfactual configurations; times are the smallest of several.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from esper.config import TrainingConfig
from esper.core.ramps import STYLES
from esper.core.site import Role
from esper.data.task import Task, resolve
from esper.data.tasks import load_task
from esper.env.vector_env import GrowthVectorEnv
from esper.files.system_info import summary_lines
from esper.hosts.cnn import CNNHost
from esper.training.snapshot import Snapshot, ValidationRecord

RECORD = ValidationRecord(1.0, 50.0, 40.0, 1.5)


def smallest(work: Callable[[], object], repeats: int) -> float:
    """Milliseconds."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        times.append(1000 * (time.process_time() - start))
    return min(times)


def measure(name: str, task: Task) -> str:
    """One row of the table."""
    config = resolve(
        TrainingConfig.parse(
            {"env": {"n_envs": 1, "baseline_episodes": 1}, "run": {"lanes": 1}}
        ),
        task,
    )
    env = GrowthVectorEnv(task, config)
    env.reset(seed=0)
    (training,), (host,) = env.training, env.backend.hosts
    for site in training.sites:
        blueprint = env.blueprints.get(training.host.topology, "conv_light")
        training.plant(site, blueprint, STYLES["LINEAR_ADD"])
        training.assign(site, Role.FOSSIL, 1.0, 1.0, learning=True)

    def epoch() -> None:
        env.backend.trainer.epoch([training])
        host.validate()

    whole = smallest(epoch, 5)
    snapshot = Snapshot()
    measured: dict[str, dict[str, float]] = {site.name: {} for site in training.sites}
    snapshot.save(training, RECORD, measured)
    capture = smallest(lambda: snapshot.save(training, RECORD, measured), 20)
    restore = smallest(lambda: snapshot.restore(training), 20)
    env.close()
    parameters = training.host.parameter_count + sum(
        site.parameters for site in training.sites
    )
    return (
        f"| {name} | {parameters:,} | {snapshot.held().total() / 1024:,.0f} | {whole:.1f} | {capture:.3f} | "
        f"{100 * capture / whole:.2f} % | {restore:.3f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    digits = load_task("digits")
    tasks = {"default": digits}
    for base in (16, 32, 64):
        tasks[f"base {base}"] = replace(
            digits, build_host=lambda base=base: CNNHost(1, 10, base=base, blocks=2)
        )  # type: ignore[misc]
    rows = [measure(name, task) for name, task in tasks.items()]
    arguments.out.write_text(
        "\n".join(
            [
                "# Cost of a snapshot",
                "",
                "`digits` hosts with a fossil in every slot; CPU time of one thread in ms, minimum of 5 epochs and of",
                "20 captures and restores. A healthy host is captured every `governor.snapshot_every` epochs, which is",
                "every epoch at the default horizon of `digits`. Every tensor is copied: training changes all of them,",
                "and the fused optimizer does so without raising their `_version`.",
                "",
                "    python benchmarks/snapshot_cost.py --out benchmarks/results/snapshot_cost.md",
                "",
                "| host | parameters | KiB a snapshot | epoch | capture | capture / epoch | restore |",
                "|" + "---|" * 7,
                *rows,
                "",
                "Made with:",
                "",
                *(f"    {line.strip()}" for line in summary_lines(paths=False)),
                "",
            ]
        )
    )


if __name__ == "__main__":
    main()
