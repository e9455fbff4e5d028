"""Which cases of a parametrised kernel test ``compute-sanitizer`` runs too."""

from collections.abc import Collection, Iterable

import pytest


def with_sanitizer(
    cases: Iterable[tuple[object, ...]], chosen: Collection[tuple[object, ...]]
) -> list[pytest.param]:  # type: ignore[valid-type]  # pytest exports no type for what this returns
    """All cases as parameters; those in ``chosen``, each of which must be one of them, get the marker ``sanitizer``."""
    cases = list(cases)
    unknown = [case for case in chosen if case not in cases]
    assert not unknown, unknown
    return [
        pytest.param(*case, marks=pytest.mark.sanitizer if case in chosen else ())
        for case in cases
    ]
