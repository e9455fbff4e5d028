"""Every test here runs with one intra-op thread."""

from tests.core_helpers import one_thread

__all__ = ["one_thread"]
