"""Baseline of the cases about training: hosts in ordinary eager PyTorch, one after another.

Written as a user would: public modules on float32 images [N, C, H, W], the loss and the number of correct predictions
read after every batch. Batches are indexed from one tensor in random order, which is faster than a DataLoader.
"""

import os
import time
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.benchmark import set_torch_threads

from esper.data.split import Split

LR = 0.05
MOMENTUM = 0.9
DECAY = 5e-4

# With which each number of threads is tried.
BATCHES = 4
TURNS = 3


def plain_cnn(
    channels: int,
    classes: int,
    base: int,
    blocks: int,
    pool_last: bool = True,
) -> nn.Sequential:
    """Returns the network of ``CNNHost`` without slots."""
    layers: list[nn.Module] = []
    for block in range(blocks):
        width = base * 2**block
        layers += [
            nn.Conv2d(channels, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
        ]
        if pool_last or block < blocks - 1:
            layers.append(nn.MaxPool2d(2))
        channels = width
    return nn.Sequential(
        *layers,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(channels, classes),
    )


class PlainTraining:
    """Hosts, each with an optimizer, trained one after another on the images and classes of ``data``."""

    def __init__(self, hosts: Sequence[nn.Module], data: Split, batch: int) -> None:
        self.x = data.inputs(0, len(data)).contiguous()
        self.y = data.y
        self.batch = batch
        self.hosts = [host.to(self.x.device).train() for host in hosts]
        self.optimizers = [torch.optim.SGD(host.parameters(), LR, MOMENTUM, weight_decay=DECAY) for host in self.hosts]

        if self.x.device.type == "cpu":
            self.threads = self._best_threads()
            how = f"best threads: {self.threads}"
        else:
            self.threads = 1
            how = "one stream"
        self.name = f"plain eager PyTorch, float32 NCHW, {how}"

    def epoch(self) -> None:
        """Trains every host once on all full batches."""
        with set_torch_threads(self.threads):
            for number in range(len(self.hosts)):
                self.train(number, len(self.y) // self.batch)

    def train(self, number: int, steps: int) -> tuple[float, float]:
        """Trains one host on random batches; returns its mean loss and its accuracy."""
        host = self.hosts[number]
        optimizer = self.optimizers[number]
        order = torch.randperm(len(self.y), device=self.x.device)
        total = 0.0
        correct = 0
        for rows in order[: steps * self.batch].view(steps, self.batch):
            x = self.x[rows]
            y = self.y[rows]
            optimizer.zero_grad()
            logits = host(x)
            loss = F.cross_entropy(logits, y)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total += loss.item()
            correct += int((logits.argmax(dim=1) == y).sum().item())
        return total / steps, correct / (steps * self.batch)

    def _best_threads(self) -> int:
        """Returns the number of intra-op threads with which one host trains fastest, tried in turns."""
        steps = min(BATCHES, len(self.y) // self.batch)
        best = dict.fromkeys(candidates(len(os.sched_getaffinity(0))), float("inf"))
        for turn in range(TURNS + 1):
            for threads in best:
                with set_torch_threads(threads):
                    start = time.perf_counter()
                    self.train(0, steps)
                    seconds = time.perf_counter() - start
                if turn > 0:  # the first turn warms up
                    best[threads] = min(best[threads], seconds)
        return min(best, key=best.__getitem__)


def candidates(cores: int) -> list[int]:
    """Returns the numbers of threads to try: all up to 8, then powers of two, and the number of cores."""
    few = range(1, min(cores, 8) + 1)
    many = [count for count in (16, 32, 64, 128) if count < cores]
    return sorted({*few, *many, cores})
