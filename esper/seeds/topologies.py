"""Topologies: the layouts of features that seeds work on, samples first."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

SPATIAL: Mapping[str, int] = MappingProxyType({"cnn": 2, "cnn1d": 1, "cnn3d": 3})
"""Number of spatial dimensions of features [B, C, ...], by topology."""

SEQUENCES = ("transformer", "encoder")
"""Topologies of features [B, T, D]: no position sees a later one, or each sees all."""

LAYOUTS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        **{topology: (2 + dims, 1) for topology, dims in SPATIAL.items()},
        **dict.fromkeys(SEQUENCES, (3, 2)),
        "mlp": (2, 1),
    }
)
"""Rank of the features and the index of their channel dimension, by topology."""


def words_of(topology: str, order: tuple[int, ...] = ()) -> str:
    """Returns the names of the dimensions of features in words, such as ``[N, C, H, W]``.

    ``order`` are the dimensions in the order that seeds expect, see ``esper.seeds.place.Place``.
    """
    names = {
        "cnn1d": "N C T",
        "cnn": "N C H W",
        "cnn3d": "N C D H W",
        **dict.fromkeys(SEQUENCES, "N T D"),
        "mlp": "N D",
    }[topology].split()
    places = order or tuple(range(len(names)))
    return f"[{', '.join(names[places.index(place)] for place in range(len(names)))}]"
