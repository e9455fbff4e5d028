"""Seeds in a network whose submodules stay what they were."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper.core.blend import Seed
from esper.core.ramps import BlendOperator
from esper.hosts.container import container_of
from esper.hosts.seed_hook import (
    attach,
    hooks_of,
    key_of,
)

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def doubled() -> Seed:
    """A seed whose delta is twice its features."""
    layer = nn.Linear(4, 4)
    nn.init.zeros_(layer.bias)
    with torch.no_grad():
        layer.weight.copy_(2 * torch.eye(4))
    return Seed(layer, BlendOperator.ADD, 4, "mlp")


class InFloat32(nn.Module):
    """Computes in float32 under autocast too, as some norms do."""

    def forward(self, x: Tensor) -> Tensor:
        return x.float()


class Pair(nn.Module):
    def forward(self, x: Tensor, *, shift: float = 0.0) -> tuple[Tensor, str]:
        return x + shift, "state"


class Block(nn.Module):
    """Reads an attribute of its first layer, as torch's own transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x)) * self.first.weight.shape[0]  # type: ignore[no-any-return]


def grown(model: nn.Module, path: str, alpha: float = 0.5) -> nn.Module:
    attach(model, {path: ("r0c0", doubled(), alpha)})
    return model


def test_the_output_gets_its_share_of_the_delta() -> None:
    model = grown(nn.Sequential(nn.Identity()), "0")
    torch.testing.assert_close(model(X), 2 * X)


def test_only_the_first_tensor_of_a_tuple_grows_and_arguments_are_passed_on() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair = Pair()

        def forward(self, x: Tensor) -> Any:
            return self.pair(x, shift=1.0)

    h, state = grown(Net(), "pair", 0.25)(X)
    torch.testing.assert_close(h, 1.5 * (X + 1))
    assert state == "state"


def test_a_grown_submodule_keeps_identity_class_attributes_and_keys() -> None:
    model = Block()
    first, keys = model.first, list(model.state_dict())
    grown(model, "first")
    assert model.first is first
    assert type(first) is nn.Linear
    assert [key for key in model.state_dict() if "grown_seeds" not in key] == keys
    assert model(X).shape == X.shape, "the forward pass reads an attribute of the layer"
    model.load_state_dict(
        {key: value for key, value in model.state_dict().items() if key in keys},
        strict=False,
    )


def test_features_keep_their_dtype_under_autocast() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    seed = Seed(InFloat32(), BlendOperator.ADD, 4, "mlp")
    attach(model, {"0": ("r0c0", seed, 0.5)})
    with torch.autocast("cpu", torch.bfloat16):
        assert seed(model(X)).dtype == torch.float32
        assert model(X).dtype == torch.bfloat16


def test_a_grown_network_trains_with_its_seed_in_its_own_mode() -> None:
    model: Any = nn.Sequential(nn.Identity(), nn.Identity()).eval()
    seed = doubled().requires_grad_(False)
    attach(model, {"0": ("r0c0", seed, 1.0)})
    assert not seed.training
    model.train()
    assert seed.training
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_are_networks_of_their_own(how: str) -> None:
    model = grown(Block(), "first")
    wanted = model(X)
    if how == "deepcopy":
        other = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert torch.equal(other(X), wanted)
    [(path, _, hook)] = hooks_of(other)
    assert path == "first"
    assert hook.seed is container_of(other, "first").get_submodule("r0c0"), (
        "the seed that acts is the one that is registered"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(other(X), wanted)
    assert other.double()(X.double()).dtype == torch.float64


LOADED = """
import sys, torch
model = torch.load(sys.argv[1], weights_only=False)
x = torch.ones(3, 4)
wanted = model(x)
for _ in range(20):  # torch numbers hooks from 0 in a new process
    model[0].register_forward_hook(lambda *_: None)
print(torch.equal(model(x), wanted))
"""


@pytest.mark.slow
def test_hooks_that_are_added_in_a_new_process_replace_no_seed(tmp_path: Any) -> None:
    model = grown(nn.Sequential(nn.Linear(4, 4)), "0")
    torch.save(model, tmp_path / "model.pt")
    done = subprocess.run(
        [sys.executable, "-c", LOADED, str(tmp_path / "model.pt")],
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "True", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
def test_a_grown_network_is_exported_with_any_number_of_samples(strict: bool) -> None:
    model = grown(Block(), "first").eval()
    shapes = ({0: torch.export.Dim("samples")},)
    program = torch.export.export(model, (X,), dynamic_shapes=shapes, strict=strict)
    other = torch.randn(7, 4)
    torch.testing.assert_close(program.module()(other), model(other))


def test_a_sequential_still_has_its_items() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    items = list(model)
    grown(model, "1")
    assert list(model) == items


def test_a_network_that_runs_all_children_of_a_module_computes_the_same() -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            for child in self.children():
                x = child(x)
            return x

    model = Chain()
    wanted = model.two(2 * model.one(X))
    torch.testing.assert_close(grown(model, "one")(X), wanted)


def test_names_of_earlier_seeds_are_not_taken_again() -> None:
    model = Block()
    for path in ("first", "last", "first"):
        grown(model, path)
    assert [key_of(hook.name) for _, _, hook in hooks_of(model)] == [
        "grown_seeds.r0c0",
        "grown_seeds.r0c0_3",
        "grown_seeds.r0c0_2",
    ]
