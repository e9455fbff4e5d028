"""Objects of earlier tests are out of sight of the searches of all objects that a loop makes."""

import gc

import pytest


@pytest.fixture(autouse=True, scope="module")
def few_objects() -> None:
    """A search looks at every object of the process: with those of all tests before, it took a third of the time."""
    gc.collect()
    gc.freeze()
