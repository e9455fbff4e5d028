"""Folders that were recorded once, for all tests."""

from __future__ import annotations

import os

import pytest

from tests.recorded import Recorded

# No test cuts the power of its machine.
os.fsync = lambda _: None


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """``recorded.run``, ``.comparison`` and ``.grown``: folders to read, made once a worker when first asked for."""
    return Recorded(tmp_path_factory.mktemp("recorded"))
