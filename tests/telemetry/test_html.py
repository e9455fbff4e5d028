"""Small pieces of HTML for notebooks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import esper
from esper.data.tasks import load_task
from esper.telemetry import html
from tests.grower.loops import Loop


def test_cells_are_text_and_numbers_stand_at_the_right() -> None:
    shown = html.table(("<a>",), [("x & y", 1234)])
    assert "<th>&lt;a&gt;</th>" in shown
    assert "x &amp; y" in shown
    assert 'text-align:right">1,234<' in shown


def test_a_picture_has_no_header_of_a_file() -> None:
    assert html.picture(b'<?xml version="1.0"?><svg></svg>').endswith(
        "<svg></svg></div>"
    )


@pytest.mark.parametrize("epochs", [0, 6])
def test_a_grower_shows_its_slots_and_then_its_life(epochs: int) -> None:
    loop = Loop(early=True).run(epochs)
    shown = loop.grower._repr_html_()
    assert "r0c0" in shown
    assert ("<svg" in shown) == (epochs > 0)
    assert repr(loop.grower) == f"Grower(Net, r0c0, r0c1, epoch {epochs} of 14)"


def test_the_life_of_a_resumed_grower_is_the_whole_one() -> None:
    first, second, whole = Loop().run(6), Loop(), Loop().run(7)
    second.model.load_state_dict(first.model.state_dict())
    second.grower.load_state_dict(first.grower.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.epoch = 6
    second.run(1)
    assert second.grower._repr_html_() == whole.grower._repr_html_()


def test_a_baseline_that_was_given_is_drawn() -> None:
    loop = Loop(baseline=[0.5] * 14, early=True).run(4)
    assert "left alone" in loop.grower._repr_html_()


def test_found_sites_are_a_table() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    found = esper.find_sites(model, torch.zeros(2, 4))
    assert str(found).startswith("site")
    assert "<td" in found._repr_html_()
    assert "0 -&gt; 2" in found._repr_html_()


def test_a_task_says_what_it_is() -> None:
    task = load_task("digits")
    assert repr(task) == "Task(digits: 997 training, 400 validation, 400 test samples)"
    shown = task._repr_html_()
    for part in ("task digits", "997", "accuracy", "classes"):
        assert part in shown


def test_a_summary_is_its_text() -> None:
    loop = Loop().run(2)
    told = loop.grower.summary()
    assert repr(told) == str(told)
    assert "Growth in 2 epochs: 327 -&gt; 327 parameters" in told._repr_html_()


def test_public_objects_have_reprs_of_a_line() -> None:
    """None prints its tensors, its events or its defaults."""
    x, y = torch.zeros(1000, 4), torch.zeros(1000, dtype=torch.int64)
    several = esper.Split({"a": x, "b": x}, y)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    found = esper.find_sites(model, x[:2])
    step = Loop(early=True).run(1).steps[0]
    config = esper.TrainingConfig().with_values(env={"n_envs": 4, "max_seeds": 3})
    facts = {"epochs": 9, "learning_rate": 0.01}
    advice = esper.advise(model, x[:2], samples=1000, classes=2, **facts)
    expected = {
        "1,000 samples: x torch.float32 of shape (4,), y torch.int64": esper.Split(
            x, y
        ),
        "samples: x a torch.float32 of shape (4,), b torch": several,
        "FoundSites(1, 0 -> 2)": found,
        "FoundSite(0 -> 2: widen, 8 wide, widen_whole": found[1],
        "GrowthStep(epoch 0: score 0.": step,
        "TrainingConfig(env=EnvConfig(n_envs=4))": config,
        "Advice(0 -> 2: ×": advice,
    }
    for words, shown in expected.items():
        assert words in repr(shown)
        assert len(repr(shown)) < 150
    assert repr(esper.TrainingConfig()) == "TrainingConfig()"
