"""A run of a thousand rounds, with everything that a run writes, needs no more memory at its end than at its start."""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from esper.data.split import Split
from esper.data.task import Task
from esper.run.experiment import Experiment
from esper.telemetry.event import (
    EpochCompleted,
    Event,
    GovernorRollback,
    RoundCompleted,
    StageChanged,
)
from tests.core_helpers import DAMAGE, digits, tiny_config
from tests.run.run_helpers import kinds
from tests.training.live_tensors import STATM, live_tensors, resident_mib

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROUNDS = 1000
WARM = ROUNDS // 10
HORIZON = 8

SCHEDULE = "\n".join(
    f'[[action]]\nepoch = {epoch}\nop = "{op}"\nslot = "{slot}"\nblueprint = "norm"\ntempo = 3\n'
    for slot, start in (("r0c0", 0), ("r1c1", 6))
    for epoch, op in enumerate(
        ["GERMINATE", "ADVANCE", "ADVANCE", "ADVANCE", "FOSSILIZE"], start
    )
)
"""A fossil after six epochs, and a living seed beside it from then on."""


class Measures:
    """Damages the host in the last epoch but one of every round, and measures memory at the end of some."""

    def __init__(self) -> None:
        self.experiment: Experiment | None = None
        self.seen: Counter[str] = Counter()
        self.resident: list[float] = []
        self.device: list[int] = []
        self.live: list[object] = []
        self.objects: list[int] = []

    def handle(self, event: Event) -> None:
        assert self.experiment is not None
        if isinstance(event, EpochCompleted) and event.epoch == HORIZON - 1:
            DAMAGE["NaN weight"](self.experiment.trainer.env.training[event.env])  # type: ignore[attr-defined]
        elif isinstance(event, GovernorRollback):
            self.seen["rollbacks"] += 1
        elif isinstance(event, StageChanged):
            self.seen[event.after] += 1
        elif isinstance(event, RoundCompleted) and event.round in (
            WARM,
            ROUNDS // 2,
            ROUNDS,
        ):
            self.live.append(live_tensors())  # which collects garbage
            self.objects.append(len(gc.get_objects()))
            self.resident.append(resident_mib())
            self.device.append(
                torch.cuda.memory_allocated() if DEVICE.type == "cuda" else 0
            )

    def close(self) -> None:
        pass


def small() -> Task:
    """40 images to validate and 40 to test on."""
    whole = digits()
    parts = {"validation": whole.validation, "test": whole.test}
    return replace(
        whole,
        **{name: Split(split.x[:40], split.y[:40]) for name, split in parts.items()},
    ).to(DEVICE)


@pytest.mark.finding("C4")
@pytest.mark.slow
@pytest.mark.skipif(not STATM.exists(), reason="resident memory is read from /proc")
def test_a_run_of_1000_episodes_is_flat(tmp_path: Path) -> None:
    """Seeds that germinate, fossilize and are cut, a rollback in every episode, log, table and checkpoints on disk."""
    schedule, folder = tmp_path / "schedule.toml", tmp_path / "run"
    schedule.write_text(SCHEDULE)
    config = tiny_config(
        1,
        HORIZON,
        run={
            "controller": f"schedule:{schedule}",
            "rounds": ROUNDS,
            "device": DEVICE.type,
        },
        task={"samples_per_epoch": 32},
        env={"one_incubating": False},
        governor={"snapshot_every": 1},
    )
    measures = Measures()
    measures.experiment = Experiment(config, folder, [measures], task=small())
    summary = measures.experiment.run()
    print(
        measures.resident,
        measures.objects,
        measures.live,
        measures.device,
        measures.seen,
    )
    assert not summary.dropped_sinks
    assert measures.seen["rollbacks"] == ROUNDS
    assert measures.seen["FOSSILIZED"] >= ROUNDS
    assert measures.seen["GERMINATED"] >= 2 * ROUNDS
    assert kinds(folder).count("EpochCompleted") == ROUNDS * HORIZON
    # Of each round the run keeps eight numbers, the figures that it ends with; a snapshot, left behind, is 6 KiB.
    assert measures.resident[-1] - measures.resident[0] < 4, measures.resident
    assert measures.live[-1] == measures.live[0], measures.live
    assert measures.device[-1] == measures.device[0], measures.device
    assert measures.objects[-1] - measures.objects[0] < 50, measures.objects
