"""Widen a 1-D CNN at the start of a Grower's loop, beside the same width from the start.

    python benchmarks/widened_at_start.py

Six kinds of noisy signals, 96 samples long. A line for each seed: test accuracy of both, %.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import esper

SIZES = ((256, 8), (600, 8))
"""Training samples and epochs."""
KINDS = 6
LENGTH = 96


def signals(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns signals [count, 1, 96] and their kinds [count]."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    time = torch.linspace(0, 1, LENGTH)[None]
    kind = torch.randint(0, KINDS, (count,), generator=generator)
    frequency = 4 + 6 * draw(count, 1)
    phase = 2 * math.pi * draw(count, 1)
    angle = 2 * math.pi * frequency * time + phase
    slow = 2 * math.pi * (1 + draw(count, 1)) * time + phase
    second = 2 * angle + 2 * math.pi * draw(count, 1)
    kinds = [
        torch.sin(angle),
        torch.sign(torch.sin(angle)),
        (angle / math.pi) % 2 - 1,
        torch.sin(angle + 1.5 * math.pi * frequency * time**2),
        torch.sin(angle) * (1 + torch.sin(slow)) / 1.3,
        torch.sin(angle) + 0.6 * torch.sin(second),
    ]
    chosen = torch.stack(kinds)[kind, torch.arange(count)]
    noise = torch.randn(count, LENGTH, generator=generator)
    return (chosen + 0.6 * noise).unsqueeze(1), kind


def network(first: int = 4, second: int = 6) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv1d(1, first, 7, padding=3),
        nn.BatchNorm1d(first),
        nn.ReLU(),
        nn.MaxPool1d(2),
        nn.Conv1d(first, second, 5, padding=2),
        nn.BatchNorm1d(second),
        nn.ReLU(),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(second, KINDS),
    )


def trained(
    seed: int, samples: int, epochs: int, widths: tuple[int, ...], grows: bool
) -> tuple[float, tuple[int, ...]]:
    """Trains a network of these ``widths``; returns its test accuracy, %, and its widths at the end."""
    torch.manual_seed(seed)
    x, y = signals(samples, 10 + seed)
    held_out, wanted = signals(300, 2)
    loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
    model = network(*widths)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def evaluate(model: nn.Module) -> Tensor:
        model.eval()
        return (model(held_out).argmax(1) == wanted).float()

    if grows:
        grower = esper.Grower(
            model,
            "auto",
            optimizer,
            horizon=epochs,
            example=x[:4],
            samples=loader,
            classes=KINDS,
        )
        grower.start(evaluate)
    for _ in range(epochs):
        model.train()
        for inputs, kinds in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), kinds).backward()
            optimizer.step()
        if grows:
            grower.step(evaluate)
    if grows:
        model = grower.finish(quiet=True)
    model.eval()
    test, kinds = signals(2000, 3)
    accuracy = 100 * float((model(test).argmax(1) == kinds).float().mean())
    return accuracy, (model[0].out_channels, model[4].out_channels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    for samples, epochs in SIZES:
        for seed in range(chosen.seeds):
            grown, widths = trained(seed, samples, epochs, (4, 6), True)
            wide, _ = trained(seed, samples, epochs, widths, False)
            print(
                f"{samples} samples, {epochs} epochs, seed {seed}: {widths[0]} and {widths[1]} channels, "
                f"grown {grown:.1f}, from the start {wide:.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
