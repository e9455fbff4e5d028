"""Submodules on which a hook cannot act, and features in another layout, are refused with what to do instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import esper
from esper.hosts.layout import check_channels, check_module, require_features, width_of


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


class OwnForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.forward = torch.compile(self.run, backend="eager")  # type: ignore[method-assign]

    def run(self, x: Tensor) -> Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


def in_place() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4))
    module.compile(backend="eager")
    return module


@pytest.mark.parametrize(
    ("part", "path"),
    [
        (lambda: compiled(nn.Sequential(nn.Linear(4, 4))), "0"),
        (lambda: compiled(nn.Sequential(nn.Linear(4, 4))), "0._orig_mod.0"),
        (in_place, "0.0"),
        (OwnForward, "0.layer"),
        (lambda: torch.jit.script(nn.Sequential(nn.Linear(4, 4))), "0.0"),
    ],
)
def test_a_site_in_a_compiled_part_is_refused(part: Any, path: str) -> None:
    model = nn.Sequential(part(), nn.Linear(4, 4))
    with pytest.raises(esper.ConfigError, match="lies in a compiled part"):
        check_module(model, "r0c0", path, "mlp")
    check_module(model, "r0c0", "1", "mlp")  # a part beside it is as good as before


def test_parts_that_are_never_called_are_refused() -> None:
    model = nn.ModuleDict(
        {
            "attention": nn.MultiheadAttention(8, 2),
            "list": nn.ModuleList([nn.Linear(2, 2)]),
        }
    )
    with pytest.raises(esper.ConfigError, match="never calls it"):
        check_module(model, "r0c0", "attention.out_proj", "mlp")
    with pytest.raises(esper.ConfigError, match="ModuleList, which is never called"):
        check_module(model, "r0c0", "list", "mlp")


LAYER = {"d_model": 8, "nhead": 2, "dim_feedforward": 16}


@pytest.mark.parametrize(
    ("model", "path"),
    [
        (lambda first: nn.Sequential(nn.GRU(4, 8, batch_first=first)), "0"),
        (
            lambda first: nn.Sequential(
                nn.Sequential(nn.LSTM(4, 8, batch_first=first))
            ),
            "0",
        ),
        (
            lambda first: nn.Sequential(
                nn.TransformerEncoderLayer(**LAYER, batch_first=first)
            ),
            "0",
        ),
        (
            lambda first: nn.Sequential(
                nn.TransformerEncoderLayer(**LAYER, batch_first=first)
            ),
            "0.linear1",
        ),
        (
            lambda first: nn.TransformerEncoder(
                nn.TransformerEncoderLayer(**LAYER, batch_first=first), 1
            ),
            "layers.0",
        ),
    ],
)
def test_layers_with_time_first_are_refused_and_others_are_not(
    model: Any, path: str
) -> None:
    with pytest.raises(esper.ConfigError, match="batch_first=True"):
        check_module(model(False), "r0c0", path, "encoder")
    check_module(model(True), "r0c0", path, "encoder")
    check_module(model(False), "r0c0", path, "mlp")


def test_a_users_module_around_a_layer_with_time_first_is_not_judged_by_it() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(4, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.gru(x.transpose(0, 1))[0].transpose(0, 1)  # type: ignore[no-any-return]

    check_module(nn.Sequential(Turned()), "r0c0", "0", "transformer")


class ChannelsLast(nn.Module):
    """A block of Swin: attention and feed-forward on [B, H, W, C]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(16), nn.Linear(16, 16)


class Inside(nn.Module):
    """A block of ConvNeXt: channels last inside, first outside."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.mlp = (
            nn.Conv2d(16, 16, 7, padding=3),
            nn.LayerNorm(16),
            nn.Linear(16, 16),
        )


def test_images_with_channels_last_are_refused() -> None:
    with pytest.raises(esper.ConfigError, match="channels last, as its layers show"):
        check_channels("slot r0c0: block", ChannelsLast(), torch.zeros(2, 8, 8, 16))
    for module, shape in (
        (Inside(), (2, 16, 8, 8)),
        (Inside(), (2, 16, 16, 16)),
        (nn.Identity(), (2, 8, 8, 16)),
    ):
        check_channels("slot r0c0: block", module, torch.zeros(shape))


def test_the_width_of_a_layer() -> None:
    widths = {
        nn.Conv2d(3, 5, 1): 5,
        nn.Linear(3, 6): 6,
        nn.BatchNorm2d(7): 7,
        nn.LayerNorm((2, 8)): 8,
        nn.GroupNorm(1, 9): 9,
        nn.ReLU(): None,
    }
    assert [width_of(layer) for layer in widths] == list(widths.values())


def test_a_number_is_no_site() -> None:
    with pytest.raises(
        esper.ConfigError, match=r"of shape \(\); seeds need floating-point"
    ):
        require_features("slot r0c0: loss", (torch.ones(2, 3).mean()))
