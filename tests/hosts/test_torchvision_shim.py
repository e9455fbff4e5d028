"""torchvision with any torch: operators that it lacks are declared before it is imported."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from esper.config import ConfigError
from esper.hosts.zoo import import_torchvision

CHILD = """
import torch
from esper.hosts.zoo import import_torchvision
torchvision = import_torchvision()
assert import_torchvision("torchvision.datasets") is torchvision.datasets
assert hasattr(torch.ops.torchvision, "nms")
model = torchvision.models.resnet18(num_classes=10)
print(tuple(model(torch.zeros(2, 3, 32, 32)).shape), import_torchvision() is torchvision)
"""


@pytest.mark.slow
def test_torchvision_is_imported_in_a_fresh_process_and_its_models_run() -> None:
    found = subprocess.run(
        [sys.executable, "-c", CHILD], capture_output=True, text=True, check=False
    )
    assert (found.returncode, found.stdout) == (0, "(2, 10) True\n"), found.stderr


def test_the_error_for_a_missing_torchvision_names_the_pair(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"pip install torch==2\.13\.0 torchvision==0\.28\.0"
    ):
        import_torchvision()
