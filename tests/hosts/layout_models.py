"""Small networks whose features have every layout, with the site of each and what is to be found there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES = 3


class Last(nn.Module):
    """Convolutional features with the channels last, as in Swin."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 6, 3, padding=1)
        self.block = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.GELU())
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.block(self.stem(x).permute(0, 2, 3, 1))
        return self.head(h.mean((1, 2)))  # type: ignore[no-any-return]


class First(nn.Module):
    """LayerNorm over the second dimension, as in ConvNeXt of timm."""

    class Norm(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), self.Norm(6))
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stem(x).mean((2, 3)))  # type: ignore[no-any-return]


class Sequence(nn.Module):
    """A transformer of torch, or a recurrent layer; each position sees all, or none that is later."""

    def __init__(self, kind: str, batch_first: bool = True) -> None:
        super().__init__()
        self.batch_first, self.causal = batch_first, kind == "causal"
        self.embed = nn.Embedding(11, 8)
        self.layers: nn.Module = nn.LSTM(8, 8, batch_first=batch_first)
        if kind != "recurrent":
            layer = nn.TransformerEncoderLayer(
                8, 2, 16, dropout=0.0, batch_first=batch_first
            )
            self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        h = h if self.batch_first else h.transpose(0, 1)
        if isinstance(self.layers, nn.LSTM):
            h = self.layers(h)[0]
        elif self.causal:
            h = self.layers(
                h,
                mask=nn.Transformer.generate_square_subsequent_mask(x.shape[1]),
                is_causal=True,
            )
        else:
            h = self.layers(h)
        return self.head(h.mean(1 if self.batch_first else 0))  # type: ignore[no-any-return]


class Mixed(nn.Module):
    """A convolutional stem before a transformer, as in hybrid vision transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU())
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x).flatten(2).transpose(1, 2)
        for layer in self.layers:
            h = layer(h)
        return self.head(h.mean(1))  # type: ignore[no-any-return]


class Graph(nn.Module):
    """Features of nodes, which a matrix mixes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        mixing = torch.softmax(x @ x.T, dim=1)
        return self.second(F.relu(mixing @ self.first(x)))  # type: ignore[no-any-return]


def convolutional(dims: int) -> nn.Module:
    convolution = {1: nn.Conv1d, 3: nn.Conv3d}[dims]
    pool = {1: nn.AdaptiveAvgPool1d, 3: nn.AdaptiveAvgPool3d}[dims]
    body = nn.Sequential(convolution(1, 6, 3, padding=1), nn.ReLU())
    return nn.Sequential(body, pool(1), nn.Flatten(), nn.Linear(6, CLASSES))


@dataclass(frozen=True)
class Case:
    """A network, the site of a slot, and what is to be found there."""

    make: Callable[[], nn.Module]
    sites: tuple[str, ...]
    found: tuple[tuple[str, tuple[int, ...]], ...]
    """Topology and order of the dimensions of each site."""
    inputs: Callable[[int], Tensor]
    """Makes inputs for a number of samples."""


def _tokens(count: int) -> Tensor:
    return torch.randint(0, 11, (count, 7))


def _images(count: int) -> Tensor:
    return torch.randn(count, 1, 8, 8)


CASES = {
    "channels last": Case(Last, ("block",), (("cnn", (0, 3, 1, 2)),), _images),
    "channels first after a LayerNorm": Case(First, ("stem",), (("cnn", ()),), _images),
    "one dimension": Case(
        lambda: convolutional(1),
        ("0",),
        (("cnn1d", ()),),
        lambda count: torch.randn(count, 1, 12),
    ),
    "three dimensions": Case(
        lambda: convolutional(3),
        ("0",),
        (("cnn3d", ()),),
        lambda count: torch.randn(count, 1, 4, 4, 4),
    ),
    "encoder": Case(
        lambda: Sequence("encoder"), ("layers.layers.0",), (("encoder", ()),), _tokens
    ),
    "causal": Case(
        lambda: Sequence("causal"),
        ("layers.layers.0",),
        (("transformer", ()),),
        _tokens,
    ),
    "recurrent": Case(
        lambda: Sequence("recurrent"), ("layers",), (("transformer", ()),), _tokens
    ),
    "time first": Case(
        lambda: Sequence("encoder", False),
        ("layers.layers.0",),
        (("encoder", (1, 0, 2)),),
        _tokens,
    ),
    "recurrent, time first": Case(
        lambda: Sequence("recurrent", False),
        ("layers",),
        (("transformer", (1, 0, 2)),),
        _tokens,
    ),
    "a stem and an encoder": Case(
        Mixed,
        ("stem", "layers.0", "layers.1"),
        (("cnn", ()), ("encoder", ()), ("encoder", ())),
        _images,
    ),
    "nodes of a graph": Case(
        Graph, ("first",), (("mlp", ()),), lambda count: torch.randn(count, 5)
    ),
}


def made(name: str) -> tuple[nn.Module, Case]:
    """Makes a network with equal weights each time."""
    torch.manual_seed(0)
    return CASES[name].make(), CASES[name]
