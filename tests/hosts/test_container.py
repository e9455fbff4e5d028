"""Where seeds are registered, and what lists, slices and copies of a network have of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper.config import ConfigError
from esper.core.blend import Seed
from esper.core.ramps import BlendOperator
from esper.grower.grower import Grower
from esper.hosts.container import CONTAINER, containers_in, home_of, network_of
from esper.hosts.seed_hook import attach, detach, hooks_of

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def tripled(model: nn.Module, path: str) -> nn.Module:
    """Lets the submodule at ``path`` return three times as much."""
    layer = nn.Linear(4, 4)
    with torch.no_grad():
        layer.weight.copy_(2 * torch.eye(4))
        layer.bias.zero_()
    attach(model, {path: ("r0c0", Seed(layer, BlendOperator.ADD, 4, "mlp"), 1.0)})
    return model


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x)))  # type: ignore[no-any-return]


def seeds_of(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters() if CONTAINER in name]


@pytest.mark.parametrize("path", ["stem", "body", "body.0", "head"])
def test_a_model_lists_the_children_that_it_had(path: str) -> None:
    """The head is cut off by ``children()[:-1]``, as in a network without seeds."""
    model = tripled(Net(), path)
    assert [name for name, _ in model.named_children()] == ["stem", "body", "head"]
    features = nn.Sequential(*list(model.children())[:-1])
    torch.testing.assert_close(features(X), model.body(model.stem(X)))
    assert bool(seeds_of(features)) is (path != "head")


@pytest.mark.parametrize("path", ["0", "2"])
def test_a_slice_has_the_parameters_of_the_seeds_that_act_in_it(path: str) -> None:
    model: Any = tripled(nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), path)
    assert len(model) == 4
    first = model[:3]
    assert len(seeds_of(first)) == 2
    torch.testing.assert_close(model[3](first(X)), model(X))
    assert first.double()(X.double()).dtype == torch.float64


def test_a_part_that_moves_to_another_network_takes_its_seed_along() -> None:
    model: Any = tripled(Net(), "stem")
    wanted = model.stem(X)
    other: Any = Net()
    other.stem = copy.deepcopy(model.stem)
    torch.testing.assert_close(other.stem(X), wanted)
    assert seeds_of(other) == seeds_of(model)
    assert any(CONTAINER in name for name in model.stem.state_dict()), (
        "its own state has the seed"
    )


def test_a_part_that_is_replaced_takes_its_seed_with_it() -> None:
    model: Any = tripled(Net(), "stem")
    model.stem = nn.Linear(4, 4)
    assert not seeds_of(model)
    assert not list(hooks_of(model))


def test_a_sequential_holds_the_seeds_in_its_last_item() -> None:
    model = tripled(Net(), "body")
    assert home_of(model, "body") == "body.1"
    assert seeds_of(model)[0].startswith(f"body.1.{CONTAINER}.r0c0.")


def test_a_layer_that_is_shared_does_not_hold_the_container() -> None:
    relu = nn.ReLU()
    inner = nn.Sequential(nn.Linear(4, 4), relu)
    model = nn.Sequential(inner, nn.Linear(4, 4), relu)
    assert home_of(model, "0") == "0.0"


def test_the_container_stands_in_the_part_that_has_all_parameters() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.loss, self.net = nn.CrossEntropyLoss(), Net()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)  # type: ignore[no-any-return]

    model: Any = nn.Sequential(Wrapper(), nn.Tanh())
    assert home_of(model, "0") == "0.net"


def test_an_empty_container_is_no_part_of_the_model() -> None:
    model = tripled(tripled(Net(), "stem"), "body")
    for _, _, hook in list(hooks_of(model)):
        detach(model, hook)
    assert not list(containers_in(model))
    assert [name for name, _ in model.named_modules()] == [
        name for name, _ in Net().named_modules()
    ]


class BaseTunerLayer:
    """Stands for the class of PEFT's layers."""


class LoraLinear(nn.Module, BaseTunerLayer):
    def __init__(self) -> None:
        super().__init__()
        self.base_layer, self.lora_A = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_A(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "site", ["stem", "stem.base_layer", "stem -> head", "head -> stem"]
)
def test_a_layer_that_a_library_replaces_later_is_no_site(site: str) -> None:
    model: Any = Net()
    model.stem = LoraLinear()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(
        ConfigError,
        match=r"stem.* lies in a LoraLinear .*merge_and_unload\(\) replaces .*around it",
    ):
        Grower(model, [site], optimizer)
    Grower(nn.Sequential(model), ["0"], optimizer).close()


@pytest.mark.parametrize(
    "average", [[nn.Parameter(torch.ones(1))], 0.5, object(), nn.Linear]
)
def test_an_average_that_is_no_module_is_refused(average: Any) -> None:
    with pytest.raises(ConfigError, match=r"is no module.*AveragedModel"):
        network_of(average, Net())
