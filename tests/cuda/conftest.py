"""Tests marked `cuda` run wherever there is a GPU with Esper's CUDA module, and say why where not."""

import pytest
import torch

from esper.ops import _native


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    cuda = next(report for report in _native.modules() if report.name == "esper._C_cuda")
    if torch.cuda.is_available() and cuda.loaded:
        return
    reason = "no GPU" if not torch.cuda.is_available() else f"esper._C_cuda is missing: {cuda.reason}"
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason=reason))
