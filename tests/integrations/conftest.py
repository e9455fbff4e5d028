"""Tests with other libraries; a test is skipped, with the reason, if its library is not installed."""

from __future__ import annotations

import importlib.util

from esper.hosts.zoo import import_torchvision

if importlib.util.find_spec("torchvision") is not None:
    import_torchvision()  # transformers and lightning import it, which fails with a CPU build of torch without this
