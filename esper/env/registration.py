"""Registers ``esper/Growth-v0`` with Gymnasium; the entry points are imported when an env is made."""

from __future__ import annotations

import gymnasium

ID = "esper/Growth-v0"

if ID not in gymnasium.registry:
    gymnasium.register(
        id=ID,
        entry_point="esper.env.entry_points:make_single",
        vector_entry_point="esper.env.entry_points:make_vector",
    )
