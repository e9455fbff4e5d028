"""Controllers by their command-line names."""

from __future__ import annotations
