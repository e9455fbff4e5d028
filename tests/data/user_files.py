"""A user's file with a task."""

from __future__ import annotations

GOOD = """
from dataclasses import dataclass, replace
from esper.data.tasks import load_task


@dataclass
class Mine:
    rate: float = 0.5


def make_task():
    return replace(load_task("digits"), name="anything", learning_rate=Mine().rate)


def not_a_task():
    return {"name": "digits"}


def fails():
    return 1 / 0


def unknown():
    return load_task("digit")


number = 3
"""
