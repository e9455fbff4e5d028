"""Tests with other libraries; a test is skipped, with the reason, if its library is not installed.

Searches of all objects, of which these libraries make many, are short.
"""

from __future__ import annotations

import importlib.util

from esper.hosts.torchvision_shim import import_torchvision
from tests.core_helpers import few_objects

__all__ = ["few_objects"]

if importlib.util.find_spec("torchvision") is not None:
    import_torchvision()  # transformers and lightning import it, which fails with a CPU build of torch without this
