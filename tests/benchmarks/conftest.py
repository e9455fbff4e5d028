"""One intra-op thread for hosts and agents in this folder's tests."""

from tests.core_helpers import one_thread

__all__ = ["one_thread"]
