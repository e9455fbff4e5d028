"""The layers between a source and a sink, found in a forward pass."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

from esper.hosts.between import Between, Trace, layers_of
from esper.hosts.sources import SitePath


class Net(nn.Module):
    """Layers, functions and a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm, self.conv2 = (
            nn.Conv2d(1, 4, 3),
            nn.BatchNorm2d(4),
            nn.Conv2d(4, 8, 3),
        )
        self.fc1, self.fc2, self.inner = (
            nn.Linear(8 * 4, 16),
            nn.Linear(16, 10),
            nn.Linear(16, 16),
        )
        self.drop, self.out = nn.Dropout(0.1), nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.conv1(x)), inplace=True), 2)
        x = F.adaptive_avg_pool2d(torch.relu(self.conv2(x)), (2, 2))
        x = F.dropout(
            F.gelu(self.fc1(x.view(x.size(0), -1)), approximate="tanh"),
            0.3,
            self.training,
        )
        x = x + self.inner(x)
        return self.out(self.fc2(self.drop(x)).sigmoid())  # type: ignore[no-any-return]


X = torch.randn(2, 1, 12, 12)


def between(model: nn.Module, text: str, x: Tensor = X) -> Between:
    site = SitePath.parse(text)
    with torch.no_grad():
        return Trace(model.eval(), lambda: model(x), [site]).between(site)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("conv1 -> conv2", ["Conv2d", "BatchNorm2d", "relu", "max_pool2d", "Conv2d"]),
        (
            "conv2 -> fc1",
            ["Conv2d", "relu", "adaptive_avg_pool2d", "Flatten", "Linear"],
        ),
        ("fc2 -> out", ["Linear", "sigmoid", "Linear"]),
        ("inner -> inner", ["Linear"]),
    ],
)
def test_layers_and_functions_are_found_and_compute_what_the_model_does(
    text: str, names: list[str]
) -> None:
    model = Net()
    found = between(model, text)
    assert found.obstacle == ""
    layers = layers_of(
        model, json.loads(json.dumps(found.parts))
    )  # they are saved as JSON
    assert [
        getattr(layer, "function", type(layer).__name__) for layer in layers
    ] == names
    seen: dict[str, Tensor] = {}
    path = SitePath.parse(text)
    assert path.source is not None
    model.get_submodule(path.source).register_forward_pre_hook(
        lambda _m, args: seen.update(source=args[0].clone())
    )
    model.get_submodule(path.sink).register_forward_hook(
        lambda _m, _i, out: seen.update(sink=out.clone())
    )
    with torch.no_grad():
        model(X)
        h = seen["source"]
        for layer in layers:
            h = layer.eval()(h)
    assert torch.equal(h, seen["sink"])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("fc1 -> inner", "add reads what lies between fc1 and inner"),
        ("inner -> fc2", "add reads what lies between inner and fc2"),
        ("conv2 -> conv1", "conv1 runs before conv2"),
    ],
)
def test_what_is_no_chain_has_a_reason(text: str, reason: str) -> None:
    assert between(Net(), text).obstacle == reason


def test_a_function_of_ones_own_kind_is_no_layer() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.softmax(self.a(x), dim=-1))  # type: ignore[no-any-return]

    assert (
        between(Odd(), "a -> b", torch.randn(2, 4)).obstacle
        == "softmax reads what lies between a and b"
    )


def test_a_layer_that_runs_twice_or_has_no_way_to_the_sink_is_no_chain() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(self.a(x))) + self.c(x)  # type: ignore[no-any-return]

    x = torch.randn(2, 4)
    assert (
        between(Twice(), "a -> b", x).obstacle
        == "a runs more than once in a forward pass"
    )
    assert (
        between(Twice(), "b -> c", x).obstacle == "add reads what lies between b and c"
    )


@pytest.mark.parametrize("first", [True, False])
def test_units_that_a_layer_beside_the_next_one_reads_are_no_chain(first: bool) -> None:
    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            if first:
                y = self.c(h)
                return self.b(torch.relu(h)) + y  # type: ignore[no-any-return]
            return self.b(torch.relu(h)) + self.c(h)  # type: ignore[no-any-return]

    reader = "relu" if first else "c"
    assert (
        between(Beside(), "a -> b", torch.randn(2, 4)).obstacle
        == f"{reader} reads what lies between a and b"
    )


def test_a_shape_may_be_asked_for_and_dropout_keeps_its_rate() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            assert h.shape[1] == h.size(1) == 4
            return self.b(F.dropout(h.relu(), p=0.25, training=self.training))  # type: ignore[no-any-return]

    plain = Plain()
    _, relu, dropout, _ = layers_of(
        plain, between(plain, "a -> b", torch.randn(2, 4)).parts
    )
    assert (relu.function, dropout.p) == ("relu", 0.25)


def test_pools_are_those_that_the_model_calls() -> None:
    class Pools(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv1d(1, 4, 3), nn.Conv1d(4, 2, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = F.max_pool1d(self.a(x).relu_(), 2, 2)
            return self.b(F.avg_pool1d(h, 2, stride=1))  # type: ignore[no-any-return]

    found = between(Pools(), "a -> b", torch.randn(2, 1, 20))
    assert [part.get("function") for part in found.parts] == [
        None,
        "relu",
        "max_pool1d",
        "avg_pool1d",
        None,
    ]
    assert found.parts[2]["options"]["stride"] == 2
    assert found.parts[3]["options"] == {"kernel_size": 2, "stride": 1}


def test_no_hook_stays_after_an_error() -> None:
    model = Net()
    with pytest.raises(RuntimeError):
        between(model, "conv1 -> conv2", torch.randn(2, 3, 12, 12))
    assert not any(
        module._forward_hooks or module._forward_pre_hooks for module in model.modules()
    )


@pytest.mark.parametrize("at", ["fc1", "fc2"])
@pytest.mark.parametrize("change", [weight_norm, spectral_norm, orthogonal])
def test_layers_whose_weights_are_computed_are_named(at: str, change: Any) -> None:
    model = Net()
    change(getattr(model, at))
    obstacle = between(model, "fc1 -> fc2").obstacle
    assert (
        obstacle == f"the weights of {at} are computed from others, as by weight_norm"
    )
