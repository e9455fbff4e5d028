"""Events of a loop have the names of slots that users know."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from esper.core.action import Op
from esper.grower.record import LoopRecord
from esper.telemetry.event import ActionTaken, StageChanged
from tests.grower.loops import Loop, plant, script

PLANTED = StageChanged(0, 0, 3, "r0c0", "norm", "DORMANT", "GERMINATED", "germinate")


def test_events_have_the_names_of_layers_and_the_epochs_of_the_loop() -> None:
    record = LoopRecord(["r0c0"], ["net.layer1"], {"r0c0": "net.layer1"})
    event = record.note(PLANTED, 1)
    assert isinstance(event, StageChanged)
    assert (event.slot, event.epoch) == ("net.layer1", 3)
    assert record.life.seeds[0].planted == 4
    assert record.take() == [event]
    assert record.take() == []


def test_names_that_were_given_stay_and_a_layer_called_host_is_not_taken_for_the_host() -> (
    None
):
    assert LoopRecord(["r0c0"], {"r0c0": "a"}, {"r0c0": "a"}).names == {"r0c0": "r0c0"}
    assert LoopRecord(["r0c0"], ["host"], {"r0c0": "host"}).names == {"r0c0": "r0c0"}


def test_a_refused_germination_is_said_once(caplog: Any) -> None:
    record = LoopRecord(["r0c0"], ["a"], {"r0c0": "a"})
    for _ in range(2):
        record.note(
            ActionTaken(0, 0, 1, Op.GERMINATE.name, "r0c0", "norm", False, "no room"), 0
        )
    assert caplog.text.count("a seed was not planted: no room") == 1


def test_callbacks_and_the_folder_of_a_loop_name_layers(tmp_path: Any) -> None:
    seen: list[Any] = []
    loop = Loop(
        controller=script({0: plant("r2c0", "widen_half")}),
        epochs=3,
        sites=["body.0 -> body.2"],
        config={},
        callbacks=[seen.append],
        folder=tmp_path / "run",
    ).run()
    loop.grower.finish(quiet=True)
    assert seen
    assert not any("r2c0" in repr(event) for event in seen)
    assert "r2c0" not in (tmp_path / "run" / "events.jsonl").read_text()


def test_a_model_with_one_layer_called_host_grows() -> None:
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.host = nn.Linear(8, 8)
            self.head = nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.host(x))  # type: ignore[no-any-return]

    loop = Loop(model=Net(), sites=["host"], epochs=3).run()  # type: ignore[arg-type]
    assert list(loop.steps[0].slots) == ["r0c0"]
