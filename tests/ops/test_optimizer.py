"""Optimizers of hosts and agents import no compiler, which would cost every process a second and 70 MB."""

import subprocess
import sys

import pytest
import torch

from esper.ops.optimizer import Adam

SCRIPT = """
import sys

import torch

from esper.ops.adamw import AdamW
from esper.ops.optimizer import Adam
from esper.ops.sgd import SGD

for make in (Adam, SGD, AdamW):
    weight = torch.nn.Parameter(torch.ones(3, 3))
    optimizer = make([weight], torch.tensor(0.1))
    weight.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
assert "torch._dynamo" not in sys.modules
"""
OF_TORCH = """
import sys

import torch

torch.optim.SGD([torch.nn.Parameter(torch.ones(3, 3))])
assert "torch._dynamo" in sys.modules, "torch does not import it either: LightOptimizer can go"
"""


def test_making_stepping_and_saving_them_imports_no_compiler() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True)


def test_adam_steps_as_that_of_torch() -> None:
    weights = [torch.nn.Parameter(torch.linspace(-1, 1, 12)) for _ in range(2)]
    optimizers = [
        make([weight], lr=0.1)
        for make, weight in zip((Adam, torch.optim.Adam), weights, strict=True)
    ]
    for _ in range(3):
        for optimizer, weight in zip(optimizers, weights, strict=True):
            optimizer.zero_grad()
            (weight**2).sum().backward()
            optimizer.step()
    assert torch.equal(*weights)
    assert not torch.equal(weights[0], torch.linspace(-1, 1, 12))


@pytest.mark.slow
def test_optimizers_of_torch_do() -> None:
    subprocess.run([sys.executable, "-c", OF_TORCH], check=True)
