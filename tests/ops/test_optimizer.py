"""Optimizers of hosts import no compiler, which would cost every process a second and 80 MB."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys

import torch

from esper.ops.adamw import AdamW
from esper.ops.sgd import SGD

for make in (SGD, AdamW):
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


@pytest.mark.slow
def test_optimizers_of_torch_do() -> None:
    subprocess.run([sys.executable, "-c", OF_TORCH], check=True)
