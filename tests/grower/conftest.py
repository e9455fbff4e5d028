"""Searches of all objects are short in this folder's tests."""

from tests.core_helpers import few_objects

__all__ = ["few_objects"]
