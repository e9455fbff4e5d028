"""The summary of a loop: layers with their units, sizes, every seed that was tried, and what stays unknown."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from esper.core.action import Op
from esper.grower.grower import Grower
from esper.grower.summary import ONLY_A_SECOND_TRAINING
from tests.grower.loops import Loop, X, Y, do, plant, scores, script

WIDENS = script({0: plant("r2c0", "widen_half")})
REMOVES = {0: plant("r0c0"), 1: do(Op.ADVANCE, "r0c0"), 4: do(Op.PRUNE, "r0c0")}


LOADER = DataLoader(TensorDataset(X, Y), batch_size=16)


class Decided(Loop):
    """A loop of three epochs whose controller is the default one."""

    def __init__(self, model: nn.Module, **arguments: Any) -> None:
        super().__init__(controller=None, model=model, epochs=3)
        self.grower = Grower(
            self.model, "auto", self.optimizer, horizon=3, example=X[:4], **arguments
        )


def decided(model: nn.Module | None = None, **arguments: Any) -> Loop:
    plain = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3))
    return Decided(plain if model is None else model, **arguments).run()


def widened(epochs: int = 4, **arguments: Any) -> Loop:
    return Loop(
        controller=WIDENS,
        epochs=epochs,
        sites=["body.0 -> body.2"],
        config={},
        **arguments,
    )


@pytest.mark.parametrize("merge", [False, True])
def test_a_widening_is_told_in_units_of_the_layer(merge: bool) -> None:
    loop = widened(merge=merge).run()
    before = sum(p.numel() for p in Loop(controller=None).model.parameters())
    told = loop.grower.summary()
    (layer,) = told.layers
    assert (layer.name, layer.before, layer.after) == ("body.0", 12, 18)
    after = sum(p.numel() for p in loop.grower.finish().parameters())
    assert (told.parameters_before, told.parameters) == (before, after)
    assert after - before == 6 * (8 + 1) + 6 * 12
    assert told.operations - told.operations_before == 2 * 6 * (8 + 12)
    assert "body.0: 12 -> 18 units" in str(told)
    became = "merged" if merge else "kept"
    seed = "widen_half in body.0 -> body.2, 12 -> 18 units"
    assert f"{seed}: planted and {became} at epoch 1" in str(told)


def test_a_step_after_which_nothing_is_left_to_do_counts_what_has_merged() -> None:
    quiet = str(widened(merge=True).run().steps[-1])
    assert quiet.endswith("; nothing on trial, 1 seed merged")


def recurrent() -> nn.Module:
    """Classifies [N, 8, 1] by an LSTM, of which no layer can be widened."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.LSTM(1, 4, batch_first=True)
            self.head = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> Any:
            return self.head(self.layers(x.unflatten(1, (8, 1)))[0][:, -1])

    return Recurrent()


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ({"samples": 64, "classes": 3, "model": recurrent()}, "it finds no layer to"),
        ({"samples": LOADER}, "it needs classes="),
        ({"classes": 3}, "it needs samples=, the DataLoader"),
        ({"samples": 64, "classes": 3}, "it needs the DataLoader as samples=, for"),
        ({"samples": 64}, "it needs the DataLoader as samples=, for the number of"),
    ],
)
def test_the_reason_that_another_controller_than_the_advisor_decides_comes_first(
    told: dict[str, Any], reason: str
) -> None:
    loop = decided(**told)
    first = str(loop.grower.summary()).splitlines()[1]
    assert first.startswith(f"  heuristic decides, not the advisor: {reason}")


def test_a_loop_that_tells_nothing_for_the_advisor_gets_no_reason() -> None:
    assert decided().grower.summary().reason == ""


def test_slots_of_a_list_are_called_by_their_layers() -> None:
    loop = widened().run()
    assert list(loop.steps[0].slots) == ["body.0 -> body.2"]
    assert "planted widen_half in body.0 -> body.2, 12 -> 18 units" in str(
        loop.steps[0]
    )
    assert loop.grower.kept == {"body.0 -> body.2": "widen_half"}
    assert not any(
        "r2c0" in line for line in map(str, (*loop.steps, loop.grower.summary()))
    )


def test_a_removed_seed_has_its_reason_and_a_kept_one_its_contribution() -> None:
    removed = Loop(controller=script(REMOVES)).run().grower.summary()
    (seed,) = removed.tried
    assert seed.removed == "pruned by the controller"
    assert (
        "mlp_small in r0c0: planted at epoch 1, pruned by the controller at epoch 5"
        in str(removed)
    )
    assert ", trial " in str(removed)
    kept = Loop().run().grower.summary()
    assert kept.tried[0].kept
    assert "contribution " in str(kept)


def test_what_only_a_second_training_tells_is_said() -> None:
    told = Loop().run().grower.summary()
    assert ONLY_A_SECOND_TRAINING in str(told)
    assert "esper.grow" in ONLY_A_SECOND_TRAINING
    known = Loop(baseline=[0.5] * 14).run().grower.summary()
    assert known.alone == 0.5
    assert "against 0.5 of the training without growth that was given" in str(known)
    assert ONLY_A_SECOND_TRAINING not in str(known)


def test_scores_are_those_of_the_last_step() -> None:
    loop = Loop().run()
    told, last = loop.grower.summary(), loop.steps[-1]
    assert (told.score, told.without_seeds) == (last.committed, last.without_seeds)


def test_of_a_merged_model_no_score_without_what_was_grown_is_given() -> None:
    assert widened(merge=True).run().grower.summary().without_seeds is None


def test_scalars_are_numbers_under_growth() -> None:
    scalars = widened().run().grower.summary().scalars()
    assert scalars["growth/units/body.0"] == 18
    assert scalars["growth/kept"] == 1
    assert scalars["growth/removed"] == 0
    assert all(
        name.startswith("growth/") and isinstance(value, int | float)
        for name, value in scalars.items()
    )


@pytest.mark.parametrize("at", [6])
def test_a_resumed_loop_tells_the_same(at: int) -> None:
    whole = Loop().run()
    first, second = Loop().run(at), Loop()
    second.model.load_state_dict(first.model.state_dict())
    second.grower.load_state_dict(first.grower.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.epoch = at
    second.run()
    assert str(second.grower.summary()) == str(whole.grower.summary())


def test_finish_prints_the_summary_unless_told_not_to(
    capsys: pytest.CaptureFixture[str],
) -> None:
    loop = Loop().run()
    loop.grower.finish()
    assert capsys.readouterr().out == f"{loop.grower.summary()}\n"
    other = Loop().run()
    other.grower.finish(quiet=True)
    assert capsys.readouterr().out == ""


def test_a_closed_output_does_not_keep_the_model_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = Loop().run()
    closed = StringIO()
    closed.close()
    monkeypatch.setattr("sys.stdout", closed)
    assert loop.grower.finish() is loop.model


def test_there_is_no_summary_before_the_first_step() -> None:
    with pytest.raises(RuntimeError, match="never called"):
        Loop().grower.summary()


@pytest.mark.parametrize(
    ("actions", "words"),
    [
        (
            {},
            "nothing was planted: a seed that is tried needs 7 decisions to be kept, and the horizon has 5",
        ),
        (
            {0: plant("r0c0")},
            "mlp_small in r0c0: planted at epoch 1, in GERMINATED at the end: gate G1 was open",
        ),
        (
            {0: plant("r0c0"), 1: do(Op.ADVANCE, "r0c0"), 4: do(Op.PRUNE, "r0c0")},
            "mlp_small in r0c0: planted at epoch 1, pruned by the controller at epoch 5",
        ),
    ],
)
def test_the_end_says_why_nothing_was_kept(actions: Any, words: str) -> None:
    told = Loop(controller=script(actions), epochs=6).run().grower.summary()
    assert words in str(told)
    assert ONLY_A_SECOND_TRAINING not in str(told)


def test_the_found_sites_of_a_model_are_called_by_their_layers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    grower = Grower(model, "auto", optimizer, horizon=3, example=X[:2])
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model.train()(X), Y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        grower.step(scores)
    assert grower.summary().layers[0].name == "0"
    assert grower.summary().layers[0].after > 8
