"""A custom network and loop on a GPU: seeds are planted, trained, kept and merged where the network is."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import esper
from esper.core.action import Op
from tests.grower.loops import LENIENT, do, plant, same, script

pytestmark = pytest.mark.cuda

DEVICE = torch.device("cuda")
Made = tuple[nn.Module, Tensor]
EPOCHS = 24


class Net(nn.Module):
    """Two convolutions, a pool and a head, with BatchNorm, in channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()
        )
        self.body = nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x)).mean((2, 3)))  # type: ignore[no-any-return]


class Text(nn.Module):
    """A transformer of PyTorch's own over 12 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.blocks = nn.ModuleList(
            [
                layer,
                nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True),
            ]
        )
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h.mean(1))  # type: ignore[no-any-return]


def pictures() -> Made:
    made = torch.Generator().manual_seed(1)
    return Net(), torch.randn(64, 3, 8, 8, generator=made)


def texts() -> Made:
    made = torch.Generator().manual_seed(1)
    return Text(), torch.randint(0, 20, (64, 12), generator=made)


SEEDS = {
    "pictures": ({"r0c0": "body", "r2c0": "stem.0 -> body.0"}, pictures, "conv_small"),
    "texts": (
        {"r0c0": "blocks.0", "r2c0": "blocks.0.linear1 -> blocks.0.linear2"},
        texts,
        "mlp_small",
    ),
}
"""Sites, the network and a blueprint for the first of them."""
WIDENED = {"pictures": 16, "texts": 40}
"""Units of the layer that is widened by a quarter, or by 8 if that is more, after it."""


def controller(blueprint: str) -> Any:
    """Grows a seed from germination to a fossil; then widens a layer, at once."""
    slot = "r0c0"
    return script(
        {
            0: plant(slot, blueprint),
            1: do(Op.ADVANCE, slot),
            4: do(Op.ADVANCE, slot),
            8: do(Op.ADVANCE, slot),
            9: do(Op.FOSSILIZE, slot),
            10: plant("r2c0", "widen_quarter"),
            11: do(Op.ADVANCE, "r2c0"),
            14: do(Op.ADVANCE, "r2c0"),
            18: do(Op.ADVANCE, "r2c0"),
            19: do(Op.FOSSILIZE, "r2c0"),
        }
    )


class Loop:
    """Trains a network on the GPU and grows it."""

    def __init__(self, kind: str, precision: str = "float32") -> None:
        torch.manual_seed(0)
        sites, make, blueprint = SEEDS[kind]
        model, inputs = make()
        self.model, self.inputs = model.to(DEVICE), inputs.to(DEVICE)
        self.labels = torch.arange(64, device=DEVICE) % 3
        self.optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        self.scaler = torch.amp.GradScaler(DEVICE.type, enabled=precision == "float16")
        self.precision = torch.autocast(
            DEVICE.type, getattr(torch, precision), enabled=precision != "float32"
        )
        self.grower = esper.Grower(
            model,
            sites,
            self.optimizer,
            controller(blueprint),
            EPOCHS,
            example=self.inputs[:4],
            config=LENIENT,
            scaler=self.scaler,
        )

    def evaluate(self, network: nn.Module) -> Tensor:
        """Returns for each of 64 samples whether it is right, [64]."""
        network.eval()
        with torch.no_grad(), self.precision:
            return (network(self.inputs).argmax(1) == self.labels).double()

    def epoch(self) -> None:
        """Trains on the 64 samples in batches of 16, then lets the controller act."""
        self.model.train()
        for rows in torch.arange(64, device=DEVICE).split(16):
            self.optimizer.zero_grad()
            with self.precision:
                loss = nn.functional.cross_entropy(
                    self.model(self.inputs[rows]), self.labels[rows]
                )
            self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.grower.step(self.evaluate)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", SEEDS)
def test_seeds_are_kept_and_merged_on_the_gpu(kind: str, precision: str) -> None:
    loop = Loop(kind, precision)
    for _ in range(EPOCHS):
        loop.epoch()
    assert set(loop.grower.kept) == set(SEEDS[kind][0])
    assert all(parameter.is_cuda for parameter in loop.model.parameters())
    loop.model.eval()
    with torch.no_grad():
        before = loop.model(loop.inputs)
        grown = loop.grower.finish(merge=True)
        after = grown(loop.inputs)
    torch.testing.assert_close(
        after, before, rtol=1e-2, atol=1e-2
    )  # convolutions round to TF32
    assert (
        loop.model.get_submodule(SEEDS[kind][0]["r2c0"].split(" -> ")[0]).weight.shape[
            0
        ]
        == WIDENED[kind]
    )
    assert all(bool(value.isfinite().all()) for value in grown.state_dict().values())


@pytest.mark.parametrize("kind", SEEDS)
def test_a_loop_that_was_stopped_goes_on_with_the_same_bits(kind: str) -> None:
    """The state goes through the CPU, as with torch.load and map_location."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        loop = Loop(kind)
        for _ in range(6):
            loop.epoch()
        saved = [
            part.state_dict() for part in (loop.model, loop.optimizer, loop.grower)
        ]
        saved = torch.load(stored(saved), map_location="cpu", weights_only=False)
        other = Loop(kind)
        other.grower.load_state_dict(saved[2])
        other.model.load_state_dict(saved[0])
        other.optimizer.load_state_dict(saved[1])
        for one in (loop, other):
            for _ in range(6, EPOCHS):
                one.epoch()
    finally:
        torch.use_deterministic_algorithms(False)
    assert same(loop.model.state_dict(), other.model.state_dict())


def stored(what: Any) -> io.BytesIO:
    """Returns a file in memory that holds ``what``."""
    file = io.BytesIO()
    torch.save(what, file)
    file.seek(0)
    return file
