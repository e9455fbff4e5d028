"""The classes for the Hugging Face hub are refused with what to use instead."""

from __future__ import annotations

import importlib

import pytest

from esper.config import ConfigError


@pytest.mark.parametrize("name", ["HubPolicy", "HubHost"])
def test_a_class_that_was_removed_names_its_successor(name: str) -> None:
    module = importlib.import_module("esper.integrations.hub")
    with pytest.raises(ConfigError, match=rf"{name} was removed: push .*upload_f"):
        getattr(module, name)
    with pytest.raises(AttributeError):
        getattr(module, "HubDataset")  # noqa: B009
