from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import esper
from esper.config import ConfigError
from esper.run.advice import advise

KNOWN: dict[str, Any] = {
    "samples": 400,
    "classes": 5,
    "epochs": 20,
    "learning_rate": 0.01,
}


def mlp(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(20, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, 5),
    )


def cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 8, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )


MODELS = {
    "mlp": (mlp(4), mlp(16), torch.randn(3, 20)),
    "cnn": (cnn(), None, torch.randn(3, 1, 8, 8)),
}


@pytest.mark.parametrize("name", MODELS)
def test_advice_has_a_plan_for_each_multiple_and_chooses_the_best(name: str) -> None:
    model, wider, example = MODELS[name]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    advice = esper.advise(model, example, **KNOWN)
    assert [plan.multiple for plan in advice.plans] == [1, 2, 4, 8, 16]
    first = advice.plans[0]
    assert first.parameters == sum(p.numel() for p in model.parameters())
    assert (first.gain, first.cost) == (0.0, 0.0)
    assert advice.chosen.net == max(plan.net for plan in advice.plans)
    assert f"×{advice.chosen.multiple} " in next(
        line for line in str(advice).splitlines() if "<- advised" in line
    )
    assert all(
        torch.equal(before[key], value) for key, value in model.state_dict().items()
    )
    if wider is not None:
        assert advice.plans[2].parameters == sum(p.numel() for p in wider.parameters())


def test_weights_between_two_wider_layers_are_priced_beside_layers_that_stay() -> None:
    """Networks whose other layers are larger than those that grow."""

    def network(width: int) -> nn.Sequential:
        hidden = (nn.Linear(64, width), nn.ReLU(), *mlp(width)[2:])
        return nn.Sequential(nn.Embedding(50, 16), nn.Flatten(), *hidden)

    advice = advise(network(8), torch.randint(50, (3, 4)), **KNOWN)
    assert len(advice.layers) == 2
    for plan in advice.plans:
        wider = network(8 * plan.multiple)
        assert plan.parameters == sum(p.numel() for p in wider.parameters())


def test_a_price_that_nothing_is_worth_leaves_the_network_as_it_is() -> None:
    advice = advise(mlp(4), torch.randn(3, 20), **KNOWN, price=1e6)
    assert advice.chosen.multiple == 1


def test_advice_warns_of_what_the_advisor_never_learned_from() -> None:
    known = advise(mlp(4), torch.randn(3, 20), **KNOWN)
    assert known.unlike == ()
    assert "warns" not in str(known)
    far = advise(mlp(4), torch.randn(3, 20), **{**KNOWN, "samples": 10**7})
    assert "samples" in far.unlike
    assert "samples" in str(far).splitlines()[-1]
    assert str(far).splitlines()[-1].startswith("the advisor warns: ")


def test_sites_can_be_named() -> None:
    advice = advise(mlp(4), torch.randn(3, 20), **KNOWN, sites=["2 -> 4"])
    assert advice.layers == {"2 -> 4": 4}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"samples": 0}, "samples is 0"),
        ({"classes": 1}, "a number of 2 or more"),
        (
            {"classes": 60},
            "classes is 60, more than the outputs of the model for a sample, 5",
        ),
        ({"epochs": 2.5}, "epochs is 2.5"),
        ({"batch_size": -1}, "batch_size is -1"),
        ({"learning_rate": float("nan")}, "learning_rate is nan"),
        ({"price": -1.0}, "price is -1.0"),
        ({"sites": ["0 -> 4"]}, "no layer of 0 -> 4 can be wider"),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        advise(mlp(4), torch.randn(3, 20), **{**KNOWN, **changed})


def test_a_model_without_hidden_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="can be wider"):
        advise(nn.Sequential(nn.Linear(20, 5)), torch.randn(3, 20), **KNOWN)
