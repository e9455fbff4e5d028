"""Averages of weights are found, or asked for."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import esper
from esper.grower.averages import averages_made_since, found_averages, given_averages
from esper.grower.hooks import SiteHooks


class Net(nn.Sequential):
    """A class that no other test averages."""


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


@pytest.fixture(autouse=True)
def collected() -> None:
    gc.collect()


def test_averages_of_the_model_are_found_and_others_are_not() -> None:
    model, other = net(), net(1)
    mine, theirs = [AveragedModel(model), AveragedModel(model)], AveragedModel(other)
    assert {id(a) for a in found_averages(model)} == {
        id(average.module) for average in mine
    }
    assert found_averages(other) == [theirs.module]
    assert found_averages(nn.Linear(2, 2)) == []


def test_one_that_may_belong_to_another_model_is_asked_for() -> None:
    model = net()
    averages = [AveragedModel(model), AveragedModel(model)]
    with torch.no_grad():
        model[0].weight.add_(1)
    with pytest.raises(
        esper.ConfigError, match=r"may belong to another one: pass averages=\[\.\.\.\]"
    ):
        found_averages(model)
    assert given_averages(averages[:1], model) == [averages[0].module]
    assert given_averages([], model) == []


def test_one_that_follows_another_growth_is_left_alone() -> None:
    model = net()
    average = AveragedModel(model)
    hooks = SiteHooks(model, {"r0c0": "0"}, "mlp")
    hooks.follow(average.module)
    assert found_averages(net()) == []


def test_a_copy_that_the_loop_averages_itself_is_given() -> None:
    model = net()
    copied = copy.deepcopy(model)
    assert found_averages(model) == []
    assert given_averages([copied], model) == [copied]
    with pytest.raises(
        esper.ConfigError, match="parameters are not those of the model"
    ):
        given_averages([nn.Linear(2, 2)], model)


def test_an_average_that_is_made_of_a_growing_model_is_known_by_its_hooks() -> None:
    model = net()
    hooks = SiteHooks(model, {"r0c0": "0"}, "mlp")
    average = AveragedModel(model)
    assert averages_made_since(hooks.origin) == [average.module]
    assert averages_made_since("another") == []
