"""Translating CUDA syntax to C++ keeps the lines, and refuses what it does not know."""

import pytest

from tests.emulation.build import CSRC
from tests.emulation.translate import operators, translate

SOURCES = sorted(CSRC.glob("cuda/*.cu*"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_lines_keep_their_numbers(path: str) -> None:
    text = path.read_text()  # type: ignore[attr-defined]
    translated = translate(text, path.name, "other")  # type: ignore[attr-defined]
    first, *lines = translated.splitlines()
    assert first == f'#line 1 "{path.name}"'  # type: ignore[attr-defined]
    assert len(lines) == len(text.splitlines())


def test_the_sources_are_found() -> None:
    assert len(SOURCES) >= 10
    names = [
        name
        for path in SOURCES
        if path.suffix == ".cu"
        for name in operators(path.read_text())
    ]
    assert "grad_stats.out" in names
    assert len(names) == len(set(names)) >= 13


@pytest.mark.parametrize(
    "line",
    ["extern __shared__ float x[];", "__constant__ int x;", "f<<<g(1), 2>>>(h(3));"],
)
def test_other_cuda_syntax_is_refused(line: str) -> None:
    with pytest.raises(
        ValueError, match=r"some.cu:2: no rule of translate.py covers this"
    ):
        translate(f"// first\n{line}\n", "some.cu", "other")
