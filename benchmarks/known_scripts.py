"""Training as three well-known scripts do it, as it is and with growth added.

    python benchmarks/known_scripts.py fashion|text|segments [--grow] [--seed 0] [--quick]

`fashion`: the network and the training of PyTorch's MNIST example (Adadelta, a step schedule, 14 epochs) on the first
3,000 images of Fashion-MNIST, which Debian's package dataset-fashion-mnist installs. `text`: a GPT of the size that
nanoGPT's README names for a CPU, trained as its train.py does (AdamW, warm-up and cosine, clipping, 2,000 iterations)
on the sources of Python's standard library, by character. `segments`: MONAI's U-Net with the settings of its 2-D
tutorial (Dice loss, Adam) on discs drawn at random, for 20 epochs. Prints one line with the score on data that neither
training nor growing has seen, and the seconds.
"""

from __future__ import annotations

import argparse
import gzip
import math
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import esper

FASHION = Path("/usr/share/datasets/fashion-mnist")
GROWTH = esper.TrainingConfig().with_values(env={"at_once": True})


@dataclass
class Script:
    """A script's own loop, an epoch at a time."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    example: Any
    epochs: int
    epoch: Callable[[], None]
    validate: Callable[[nn.Module], Any]
    """Score on validation data, higher is better."""
    test: Callable[[nn.Module], float]
    points: float = 100.0
    """Percentage points in one unit of the score."""
    schedule: Any = None
    """The learning-rate schedule."""


def images(kind: str, count: int) -> tuple[Tensor, Tensor]:
    """Returns the first ``count`` images [n, 1, 28, 28] of a set of Fashion-MNIST, and their classes [n]."""
    with gzip.open(FASHION / f"{kind}-images-idx3-ubyte.gz") as file:
        pixels = torch.frombuffer(bytearray(file.read()[16:]), dtype=torch.uint8).view(
            -1, 1, 28, 28
        )[:count]
    with gzip.open(FASHION / f"{kind}-labels-idx1-ubyte.gz") as file:
        labels = torch.frombuffer(bytearray(file.read()[8:]), dtype=torch.uint8)[:count]
    return (pixels.float() / 255 - 0.2860) / 0.3530, labels.long()


class Classifier(nn.Module):
    """Two convolutions and two linear layers, of PyTorch's example."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3), nn.Conv2d(32, 64, 3)
        self.drop1, self.drop2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(9216, 128), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.conv2(F.relu(self.conv1(x))))
        h = self.drop1(F.max_pool2d(h, 2)).flatten(1)
        return F.log_softmax(self.fc2(self.drop2(F.relu(self.fc1(h)))), 1)


def fashion(quick: bool) -> Script:
    x, y = images("train", 600 if quick else 3000)
    held_x, held_y = (each[-1000:] for each in images("train", 4000))
    test_x, test_y = images("t10k", 500 if quick else 10_000)
    model = Classifier()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)

    def epoch() -> None:
        model.train()
        for rows in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            F.nll_loss(model(x[rows]), y[rows]).backward()
            optimizer.step()
        schedule.step()

    def right(network: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
        network.eval()
        with torch.no_grad():
            found = torch.cat([network(part).argmax(1) for part in inputs.split(1000)])
        return (found == labels).float()

    return Script(
        model,
        optimizer,
        x[:4],
        2 if quick else 14,
        epoch,
        lambda network: right(network, held_x, held_y),
        lambda network: 100 * float(right(network, test_x, test_y).mean()),
        schedule=schedule,
    )


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = (
            nn.LayerNorm(width, bias=False),
            nn.LayerNorm(width, bias=False),
        )
        self.qkv, self.mix = (
            nn.Linear(width, 3 * width, bias=False),
            nn.Linear(width, width, bias=False),
        )
        self.up, self.down = (
            nn.Linear(width, 4 * width, bias=False),
            nn.Linear(4 * width, width, bias=False),
        )
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            self.qkv(self.norm1(x))
            .view(batch, length, 3, self.heads, -1)
            .permute(2, 0, 3, 1, 4)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(self.act(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """A decoder of characters, with the head tied to the embedding."""

    def __init__(
        self,
        characters: int,
        length: int,
        layers: int = 4,
        heads: int = 4,
        width: int = 128,
    ) -> None:
        super().__init__()
        self.tokens, self.positions = (
            nn.Embedding(characters, width),
            nn.Embedding(length, width),
        )
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm, self.head = (
            nn.LayerNorm(width, bias=False),
            nn.Linear(width, characters, bias=False),
        )
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))  # type: ignore[no-any-return]


def text(quick: bool) -> Script:
    length, batch, iterations, every = (
        64,
        12,
        (40 if quick else 2000),
        (20 if quick else 100),
    )
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    letters = "".join(
        file.read_text(encoding="utf-8", errors="ignore") for file in files
    )[:2_000_000]
    letters = letters.encode("ascii", "ignore").decode()
    known = sorted(set(letters))
    index = {letter: number for number, letter in enumerate(known)}
    data = torch.tensor([index[letter] for letter in letters])
    first, second = -len(data) // 5, -len(data) // 10
    parts = {
        "train": data[:first],
        "validation": data[first:second],
        "test": data[second:],
    }
    model = GPT(len(known), length)
    optimizer = torch.optim.AdamW(
        model.parameters(), 1e-3, betas=(0.9, 0.99), weight_decay=0.1
    )

    def rate(step: int) -> float:
        """Warm-up over 100 iterations, then a cosine down to a tenth."""
        return min(
            (step + 1) / 100,
            0.1 + 0.45 * (1 + math.cos(math.pi * min(1, step / iterations))),
        )

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)

    def pieces(
        part: Tensor, count: int, draws: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(part) - length - 1, (count,), generator=draws)
        rows = starts[:, None] + torch.arange(length + 1)
        return part[rows[:, :-1]], part[rows[:, 1:]]

    def epoch() -> None:
        model.train()
        for _ in range(every):
            x, y = pieces(parts["train"], batch)
            optimizer.zero_grad()
            F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()

    def loss(network: nn.Module, part: str, count: int) -> Tensor:
        network.eval()
        draws = torch.Generator().manual_seed(0)
        with torch.no_grad():
            found = [
                F.cross_entropy(network(x).transpose(1, 2), y, reduction="none").mean(1)
                for x, y in (pieces(parts[part], 50, draws) for _ in range(count // 50))
            ]
        return torch.cat(found)

    return Script(
        model,
        optimizer,
        pieces(parts["train"], 4)[0],
        iterations // every,
        epoch,
        lambda network: -loss(network, "validation", 300),
        lambda network: float(loss(network, "test", 500 if quick else 5000).mean()),
        points=25.0,
        schedule=schedule,
    )


def discs(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns noisy pictures [n, 1, 96, 96] of discs, and the discs."""
    draws = torch.Generator().manual_seed(seed)
    y, x = torch.meshgrid(torch.arange(96.0), torch.arange(96.0), indexing="ij")
    masks = torch.zeros(count, 1, 96, 96)
    shades = torch.zeros(count, 1, 96, 96)
    for number in range(count):
        for _ in range(12):
            a, b, radius, shade = torch.rand(4, generator=draws).tolist()
            inside = (x - 96 * a) ** 2 + (y - 96 * b) ** 2 < (4 + 8 * radius) ** 2
            masks[number, 0][inside] = 1.0
            shades[number, 0][inside] = 0.5 + 0.5 * shade
    return shades + 0.5 * torch.rand(shades.shape, generator=draws), masks


def segments(quick: bool) -> Script:
    import monai

    x, y = discs(20, 0)
    held, test = discs(20, 1), discs(40, 2)
    sizes: dict[str, Any] = {
        "channels": (16, 32, 64, 128, 256),
        "strides": (2, 2, 2, 2),
        "num_res_units": 2,
    }
    model = monai.networks.nets.UNet(
        spatial_dims=2, in_channels=1, out_channels=1, **sizes
    )
    criterion = monai.losses.DiceLoss(sigmoid=True)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def epoch() -> None:
        model.train()
        for rows in torch.randperm(len(x)).split(4):
            optimizer.zero_grad()
            criterion(model(x[rows]), y[rows]).backward()
            optimizer.step()

    def dice(network: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
        """Dice score of each picture, [n]."""
        network.eval()
        with torch.no_grad():
            found = (network(data[0]) > 0).float()
        both = (found * data[1]).sum((1, 2, 3))
        return 2 * both / (found.sum((1, 2, 3)) + data[1].sum((1, 2, 3)))

    return Script(
        model,
        optimizer,
        x[:2],
        2 if quick else 20,
        epoch,
        lambda network: dice(network, held),
        lambda network: 100 * float(dice(network, test).mean()),
    )


def grow(script: Script) -> nn.Module:
    """Trains and grows; returns the network. These are the lines that growth adds to a script."""
    grower = esper.Grower(
        script.model,
        "auto",
        script.optimizer,
        horizon=script.epochs,
        example=script.example,
        points=script.points,
        config=GROWTH,
        scheduler=script.schedule,
    )
    print(grower.start(script.validate), file=sys.stderr)
    for _ in range(script.epochs):
        script.epoch()
        print(grower.step(script.validate), file=sys.stderr)
    print(
        "kept:",
        {str(grower.paths[slot]): blueprint for slot, blueprint in grower.kept.items()},
        file=sys.stderr,
    )
    return grower.finish(merge=True)


def main() -> None:
    """Run one script and print its result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("script", choices=("fashion", "text", "segments"))
    parser.add_argument("--grow", action="store_true")
    parser.add_argument(
        "--quick", action="store_true", help="hardly train; shows that it runs"
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    script = {"fashion": fashion, "text": text, "segments": segments}[arguments.script](
        arguments.quick
    )
    size = sum(p.numel() for p in script.model.parameters())
    began = time.perf_counter()
    if arguments.grow:
        network = grow(script)
    else:
        network = script.model
        for _ in range(script.epochs):
            script.epoch()
            script.validate(network)
    seconds = time.perf_counter() - began
    grown = sum(p.numel() for p in network.parameters())
    what = f"{arguments.script} {'grown' if arguments.grow else 'alone'} seed {arguments.seed}"
    print(
        f"{what}: {script.test(network):.3f}, {size:,} to {grown:,} parameters, {seconds:.0f} s",
        flush=True,
    )


if __name__ == "__main__":
    main()
