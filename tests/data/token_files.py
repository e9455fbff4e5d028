"""Token files with known tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from esper.data.tinystories import VOCABULARY


def write_bins(folder: Path, tokens: int = 5_000) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for part in ("train", "validation"):
        (np.arange(tokens) % VOCABULARY).astype("<u2").tofile(folder / f"{part}.bin")
