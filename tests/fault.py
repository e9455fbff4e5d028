"""A small edit of one file, after which a test that is named must fail."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Fault:
    """An edit of one file, whose old text must be there exactly once, and tests that must notice it."""

    name: str
    file: str
    old: str
    new: str
    tests: str
    """A test's node id, such as ``tests/test_x.py::test_y``, or an expression for ``pytest -k``."""

    def plant(self, root: Path) -> None:
        """Edit the file below ``root``. Raises ValueError if the old text is not there exactly once."""
        path = root / self.file
        text = path.read_text()
        found = text.count(self.old)
        if found != 1:
            raise ValueError(
                f"{self.file} must have this once, and has it {found} times: {self.old}"
            )
        path.write_text(text.replace(self.old, self.new))
